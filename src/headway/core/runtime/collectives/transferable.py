"""Dtypes that every communication backend can transfer, and the dtypes in which reductions are computed."""

from collections.abc import Iterable

import torch

_TRANSFERABLE_NAMES = "bool uint8 int8 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"

_TRANSFERABLE = frozenset(getattr(torch, name) for name in _TRANSFERABLE_NAMES.split())

_BY_WIDTH = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def is_transferable_dtype(dtype: torch.dtype) -> bool:
    """Whether every backend can transfer tensors of this dtype. Others are sent as views in a dtype of equal width."""
    return dtype in _TRANSFERABLE


def make_transferable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in a form that all backends can send and receive in place.

    A tensor with a dtype that a backend lacks is replaced by a detached view in a supported dtype of equal width. A
    lazy conjugate is replaced by a detached view of the values in its memory. The others are returned unchanged.
    """
    return [tensor if is_transferable(tensor) else _view_memory(tensor.detach()) for tensor in tensors]


def is_transferable(tensor: torch.Tensor) -> bool:
    """Whether every backend can transfer the tensor itself.

    False for a lazy conjugate, whose memory holds other values, and for dtypes that some backend lacks.
    """
    return is_transferable_dtype(tensor.dtype) and not tensor.is_conj()


def _view_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that backends can transfer. For a lazy conjugate, it shows the values in memory, without conjugation."""
    return tensor.conj() if tensor.is_conj() else view_as_transferable(tensor)


def view_as_transferable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor in a dtype that all backends support (gloo lacks int16, uint32 and float8).

    The dtype of the view has the width of the tensor's dtype. A tensor whose dtype is supported is returned unchanged.
    """
    return tensor if tensor.dtype in _TRANSFERABLE else tensor.view(_BY_WIDTH[tensor.dtype.itemsize])


def choose_arithmetic(dtype: torch.dtype, reduction: str) -> tuple[torch.dtype, torch.dtype]:
    """Return a pair of the dtype in which a reduction is computed and the dtype of its result.

    A mean of integers is a float32 result. A sum of booleans counts in int64.

    Args:
        dtype: Dtype of the tensors to reduce.
        reduction: "sum", "mean", "max" or "min".
    """
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if is_inexact:
        return (dtype, dtype) if dtype in _TRANSFERABLE else (torch.float32, dtype)
    if reduction == "mean":
        return torch.float32, torch.float32
    if dtype == torch.bool:
        return torch.int64, torch.int64 if reduction == "sum" else torch.bool
    return (dtype, dtype) if dtype in _TRANSFERABLE else (torch.int64, dtype)
