"""bitsandbytes' four-bit layers without values, as they are once weights are loaded: packed, their scales beside them."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

_NESTED_BLOCK = 256


def is_four_bit(module: nn.Module) -> bool:
    """Is it one of bitsandbytes' four-bit layers, its weight not packed yet?"""
    package = sys.modules.get("bitsandbytes")
    return (
        package is not None
        and isinstance(module, package.nn.Linear4bit)
        and getattr(module, "quant_state", None) is None
    )


def pack(module: Any, fake: FakeTensorMode) -> None:
    """Replace a layer's weight by two numbers a byte and what undoes that, without computing it."""
    make_state: Any = sys.modules["bitsandbytes.functional"].QuantState
    weight = module.weight
    blocks = -(-weight.numel() // weight.blocksize)
    size = -(-weight.numel() // 2) // weight.quant_storage.itemsize
    with fake:
        packed = nn.Parameter(torch.empty((size, 1), dtype=weight.quant_storage), requires_grad=False)
        scales = torch.empty(blocks, dtype=torch.uint8 if weight.compress_statistics else torch.float32)
        offset, inner = None, None
        if weight.compress_statistics:
            offset = torch.empty(())
            inner = make_state(
                absmax=torch.empty(-(-blocks // _NESTED_BLOCK)),
                code=torch.empty(256),
                blocksize=_NESTED_BLOCK,
                dtype=torch.float32,
            )
        module.quant_state = make_state(
            absmax=scales,
            shape=weight.shape,
            code=torch.empty(16),
            blocksize=weight.blocksize,
            quant_type=weight.quant_type,
            dtype=weight.dtype,
            offset=offset,
            state2=inner,
        )
    packed.quant_state = module.quant_state  # type: ignore[attr-defined]
    module._parameters["weight"] = packed


def scales_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """What a four-bit layer keeps beside its weight; of other modules nothing."""
    state = getattr(module, "quant_state", None)
    while state is not None:
        yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, torch.Tensor))
        state = state.state2
