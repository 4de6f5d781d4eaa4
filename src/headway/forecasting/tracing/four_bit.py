"""Convert four-bit layers of bitsandbytes, without values, to the form that they have after weights are loaded.

In that form, the weight is packed, with two numbers per byte, and the quantization scales are stored in separate
tensors.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headway.forecasting._torch import FakeTensorMode

_NESTED_BLOCK = 256
"""Block size of bitsandbytes' second quantization (`bnb_4bit_use_double_quant`), which quantizes the scales."""


def is_unpacked_four_bit(module: nn.Module) -> bool:
    """Whether the module is a four-bit layer of bitsandbytes whose weight is not packed yet."""
    package = sys.modules.get("bitsandbytes")
    return (
        package is not None
        and isinstance(module, package.nn.Linear4bit)
        and getattr(module, "quant_state", None) is None
    )


def pack_four_bit(module: Any, fake: FakeTensorMode) -> None:
    """Replace a four-bit layer's weight with a packed tensor (two numbers per byte), and set the quantization state.

    No values are computed.

    Args:
        module: Four-bit layer of bitsandbytes.
        fake: Fake mode that the new tensors belong to.
    """
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


def iterate_scales(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors with the quantization scales of a four-bit layer. Yield nothing for other modules."""
    state = getattr(module, "quant_state", None)
    while state is not None:
        yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, torch.Tensor))
        state = state.state2
