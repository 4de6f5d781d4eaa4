"""Helpers for tensors without values: the inner tensors of wrapper subclasses, and empty copies of tensors.

A DTensor contains this rank's shard, and a quantized tensor contains its numbers and scales. A trace counts the memory
of such inner tensors.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from headway.forecasting._torch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type


def iterate_plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that own memory: the tensor itself, or the inner tensors of a subclass such as DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
            yield from iterate_plain_tensors(inner)


def has_wrapper_type(types: Iterable[type]) -> bool:
    """Whether any type is a wrapper subclass, whose operations are dispatched again on its inner tensors."""
    return any(is_traceable_wrapper_subclass_type(each) for each in types)


def make_empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor on the CPU with the shape, strides and dtype of the given tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def make_empty_like(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return an uninitialized tensor with the shape, strides, dtype and Python attributes of another tensor.

    The new tensor takes no memory if a fake mode is active or if `device` is "meta".

    Args:
        tensor: Tensor to imitate. If it is a parameter, the result is a parameter, too.
        device: Device of the new tensor. Default: "cpu".
    """
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    empty.__dict__.update({key: value for key, value in tensor.__dict__.items() if key not in empty.__dict__})
    return empty
