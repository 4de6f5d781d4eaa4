"""Shapes, dtypes and raw bytes of tensors, as files store them."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from headway.errors import CheckpointError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""
_COPYABLE_INTEGERS = {
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor in a file.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of its values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: Any) -> torch.dtype:
    """Return torch's dtype with the given name.

    Raises:
        CheckpointError: If this version of torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory in a dtype that torch can copy.

    If torch can copy the tensor's own dtype, the tensor itself is returned. Otherwise the view has integers of equal
    size. Some dtypes (int4, uint4 and similar ones) can be stored and viewed in torch, but neither copied nor cast.
    """
    dtype = tensor.dtype
    if dtype in _COPYABLE_INTEGERS or dtype.is_floating_point or dtype.is_complex:
        return tensor
    return tensor.view(INTEGERS[dtype.itemsize])


def get_raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's values in row-major order, as a 1-D uint8 tensor on the host.

    The values are copied only if necessary. Otherwise the result shares the tensor's memory.
    """
    flat = view_as_bits(tensor.detach().resolve_conj().resolve_neg()).contiguous().cpu().reshape(-1)
    if flat.numel() == 1:  # contiguous to torch with any stride, but view() as bytes needs stride 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def is_bit_identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    has_equal_layout = one.dtype == other.dtype and one.shape == other.shape
    return has_equal_layout and torch.equal(get_raw_bytes(one), get_raw_bytes(other))


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor's memory holds its values in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as uint8, on the tensor's device.

    The memory must hold the values in row-major order.
    """
    flat = view_as_bits(tensor.detach()).reshape(-1)
    if flat.numel() == 1:  # contiguous to torch whatever its stride is, but not to a view as bytes
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
