"""Tensors that a trace sees otherwise than a run: those that stand for others, and those whose sizes depend on values.

A DTensor holds this rank's part, a quantised tensor its numbers and scales. bitsandbytes' four-bit layers are made as they are once
weights are loaded: packed, their scales beside them. Results whose sizes depend on values, which a trace does not have, are taken at
their largest; attention's masks hide nothing.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

aten = torch.ops.aten


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the memory: the tensor itself, or what it holds."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, torch.Tensor):  # a DTensor names its mesh, too
            yield from plain(held)


def stand_for_others(types: Iterable[type]) -> bool:
    """Is one of these a class of tensors whose operations come back as those on what they hold?"""
    return any(is_traceable_wrapper_subclass_type(each) for each in types)


def without_values(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Its shape, strides, dtype and attributes; on the CPU in a fake mode, or on the meta device, it takes no memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update({key: value for key, value in tensor.__dict__.items() if key not in made.__dict__})
    return made


MASK = "attention_mask"
POSITIONS = "position_ids"

_UNMASKED = "headway_unmasked"


def unmasked(model: nn.Module) -> nn.Module:
    """Attention as in a run whose samples have no padding, in which transformers leaves the causal mask to the kernel.

    Of tensors without values it cannot see that no token is masked, and would build the mask and repeat keys and values for it. For
    an implementation with no mask function of its own it builds none.
    """
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
        model.set_attn_implementation(_UNMASKED)  # type: ignore[operator]
    return model


def drop_masks(model: nn.Module) -> None:
    """Let a transformers model that is called with a mask leave it out, as it does where it sees that nothing is masked."""

    def without(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {key: value for key, value in kwargs.items() if key != MASK}

    model.register_forward_pre_hook(without, with_kwargs=True)


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


def at_most(func: Any, args: tuple[Any, ...]) -> Any:
    """The largest result that the operation can have; None: its size does not depend on values, or they are there."""
    if not args or not isinstance(args[0], FakeTensor):
        return None
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
    if func is aten.masked_select.default:
        return (args[0] * args[1]).flatten()
    if func is aten._unique2.default:
        indices = [args[0].new_empty(args[0].shape, dtype=torch.long) for _ in range(2)]
        return args[0].new_empty(args[0].numel()), *indices
    if func in (aten._ctc_loss.Tensor, aten._ctc_loss.default):
        steps, batch, targets = args[0].shape[0], args[0].shape[1], args[1]
        longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
        return args[0].new_empty(batch), args[0].new_empty((batch, steps, 2 * longest + 1))
    if func in (aten._ctc_loss_backward.Tensor, aten._ctc_loss_backward.default):
        return torch.empty_like(args[1])
    return None


def without_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index's arguments, each mask of bools in it replaced by as many indices as it has elements."""
    if not args or not isinstance(args[0], FakeTensor):
        return args
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        return args
    if all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]):
        return args
    indices: list[Any] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        indices += [index.new_empty(index.numel(), dtype=torch.long) for _ in index.shape] if is_mask else [index]
    return args[0], indices, *args[2:]
