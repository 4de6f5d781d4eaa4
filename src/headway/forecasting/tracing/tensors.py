"""Tensors that stand for others, and attention whose masks hide nothing: what a trace sees otherwise than a run.

A DTensor holds this rank's part, a quantised tensor its numbers and scales.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type


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
