"""Tensors in checkpoint files: convert any layout to dense tensors and back. Write, hash, verify and map the files.

Sparse and quantized tensors are split into dense ones. Tensors that a checkpoint cannot hold are refused.

Files hold the values of a tensor in row-major order. Its stride is saved, too. In another memory layout, sums and
matrix products round differently, and a resumed run would not be bit-identical.

Files are in safetensors format. They are hashed piece by piece while they are written, verified when complete, and
read by memory map. A piece is the part of a file that one hash covers.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headway.common.object_path import THREADS, ObjectPath
from headway.common.untrusted import open_regular_file
from headway.core.checkpoint import _torch
from headway.core.checkpoint.format.manifest import PIECE, WrittenFile
from headway.core.weights.files import StoredTensor
from headway.core.weights.parallel_writer import ParallelWriter, RangedFile, count_threads
from headway.core.weights.pieces import ShardPiece, get_local_part, is_dtensor, replace_local
from headway.core.weights.shards import (
    CODES,
    TensorSpec,
    get_dtype_name,
    get_raw_bytes,
    read_header,
    view_as_bits,
)
from headway.errors import CheckpointError

_COMPRESSED: dict[str, tuple[str, str]] = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor in new memory."""
    return view_as_bits(tensor).clone().view(tensor.dtype)


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a lazy module whose first forward has not yet determined the tensor's shape."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def explain_refusal(tensor: torch.Tensor) -> str | None:
    """Return the reason why a checkpoint cannot hold a tensor, with advice. Return None if it can hold the tensor."""
    kind = type(tensor)
    if is_uninitialized(tensor):
        return "a parameter without values yet (of a lazy module): run one forward before the save"
    if tensor.is_nested:
        return "a nested tensor: save what unbind() returns"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, which keeps its values elsewhere: save the plain tensors in it"
        )
    if tensor.is_meta:
        return "a tensor of the meta device, which has no values: load or initialize it before the save"
    if any(getattr(tensor, "names", ())):
        return "a tensor with named dimensions, which would be lost: save tensor.rename(None)"
    if tensor.is_quantized:
        scheme = _get_qscheme(tensor)
        is_held = scheme in _SCHEMES and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32)
        return None if is_held else f"a quantized tensor of {tensor.dtype} with {scheme or 'no scale'}: save its parts"
    if tensor.layout not in (torch.strided, torch.sparse_coo) and _format_layout(tensor) not in _COMPRESSED:
        return f"a {tensor.layout} tensor: save tensor.to_dense()"
    return None


def _get_qscheme(tensor: torch.Tensor) -> Any:
    try:
        return tensor.qscheme()
    except RuntimeError:  # e.g. made by torch.empty
        return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and not quantized. Its values in row-major order then represent it completely."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _format_layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def split_into_dense(tensor: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Split a sparse or quantized tensor, which is not a DTensor, into dense tensors.

    Returns:
        Pair of (description that `join_from_dense` needs, dense tensors).
    """
    if tensor.is_quantized:
        values, dtype = tensor.int_repr(), get_dtype_name(tensor.dtype)
        if tensor.qscheme() == torch.per_tensor_affine:
            about = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return {"layout": "quantized", "dtype": dtype, **about}, [values]
        about = {"axis": tensor.q_per_channel_axis()}
        scales = [values, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return {"layout": "quantized", "dtype": dtype, **about}, scales
    shape, layout = list(tensor.shape), _format_layout(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = _torch.read_sparse_parts(tensor)
        return {"layout": layout, "shape": shape, "is_coalesced": tensor.is_coalesced()}, parts
    outer, inner = _COMPRESSED[layout]
    return {"layout": layout, "shape": shape}, [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]


def join_from_dense(about: Mapping[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rebuild a tensor from the description and the dense tensors that `split_into_dense` returned.

    Args:
        about: Description of the tensor.
        parts: Dense tensors.

    Raises:
        CheckpointError, RuntimeError, LookupError, TypeError, ValueError: If the arguments are not results of
            `split_into_dense`.
    """
    layout = about["layout"]
    if layout == "quantized":
        values, dtype = parts[0], getattr(torch, about["dtype"])
        if len(parts) == 1:
            make: Callable[..., torch.Tensor] = _torch.make_per_tensor_quantized
            tensor = make(values, about["scale"], about["zero_point"])
        else:
            tensor = _torch.make_per_channel_quantized(values, parts[1], parts[2], about["axis"])
        if tensor.dtype != dtype:
            raise CheckpointError(f"the manifest says {dtype} of a quantized tensor of {tensor.dtype}")
        return tensor
    shape = torch.Size(about["shape"])
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts[0], parts[1], shape, is_coalesced=about["is_coalesced"] or None, check_invariants=True
        )
    if layout not in _COMPRESSED:
        raise CheckpointError(f"the manifest says {layout!r} of a tensor's layout, which is unknown")
    outer, inner, values = parts
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=getattr(torch, layout), check_invariants=True
    )


# -------------------------------------------------------------------- strides

_MAX_SPAN_FACTOR, _MAX_SPAN_BYTES = 16, 16 * 2**20
"""Limits for views with gaps between their elements. A view that exceeds them is saved without its stride.

A view may span `_MAX_SPAN_FACTOR` times the memory of its elements, or `_MAX_SPAN_BYTES` bytes. The larger of the two
limits applies. Without a limit, a manifest could claim unbounded memory.
"""


def get_saved_stride(tensor: Any) -> list[int] | None:
    """Return the stride that a checkpoint records for a tensor, so that a load can restore it.

    Return None if the tensor is in row-major order or is a `ShardPiece`. For a view whose elements are too far apart,
    return a stride without gaps.

    Args:
        tensor: Strided tensor, DTensor or `ShardPiece`. For a DTensor, the result is the stride of the full tensor,
            without gaps.
    """
    if isinstance(tensor, ShardPiece):
        return None
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_contiguous() and 0 not in shape and 1 not in shape:
        return None  # the usual case, checked first
    if is_dtensor(tensor) or not _is_bounded(shape, stride, tensor.element_size()):
        stride = _make_dense_stride(shape, stride)
    return None if stride == _make_dense_stride(shape) else list(stride)


def set_stride(tensor: Any, stride: Sequence[int]) -> Any:
    """Return a tensor with the given stride and equal values.

    A tensor that already has the stride is returned unchanged.

    Args:
        tensor: Dense tensor or DTensor. Other objects are returned unchanged.
        stride: One number per dim, as `get_saved_stride` returns it.

    Raises:
        CheckpointError: If the stride does not fit the shape, or takes too much memory.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor  # a shard that is not a DTensor has no stride
    new_stride, shape = tuple(stride), tuple(tensor.shape)
    is_sound = len(new_stride) == len(shape) and all(type(each) is int and 0 <= each < 2**62 for each in new_stride)
    if not is_sound or not _is_bounded(shape, new_stride, tensor.element_size()):
        raise CheckpointError(f"the manifest has the stride {list(stride)!r} of a tensor of shape {shape}")
    if tuple(tensor.stride()) == new_stride:
        return tensor
    if is_dtensor(tensor):
        local = get_local_part(tensor)
        return replace_local(tensor, set_stride(local, _make_dense_stride(tuple(local.shape), new_stride)), new_stride)
    result = torch.empty_strided(shape, new_stride, dtype=tensor.dtype, device=tensor.device)
    target, values = view_as_bits(result), view_as_bits(tensor.detach())
    for dim, (size, step) in enumerate(zip(shape, new_stride)):
        if step == 0 and size > 1:  # as expand() makes it: torch refuses to write one element several times
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return result


def _make_dense_stride(shape: Sequence[int], like: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a stride without gaps between elements, with dims in the order of the stride `like`.

    Args:
        shape: Shape of the tensor.
        like: Stride that determines the order of dims. Default: None, row-major order.
    """
    dims = range(len(shape)) if like is None else sorted(range(len(shape)), key=lambda dim: -like[dim])
    stride, step = [0] * len(shape), 1
    for dim in reversed(dims):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


def _is_bounded(shape: Sequence[int], stride: Sequence[int], item_bytes: int) -> bool:
    """Whether the memory that a tensor spans, including gaps between its elements, is within the limits.

    Args:
        shape: Shape of the tensor.
        stride: Stride of the tensor.
        item_bytes: Bytes per element.
    """
    if not prod(shape):
        return True
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    return span <= max(_MAX_SPAN_FACTOR * prod(shape), _MAX_SPAN_BYTES // item_bytes)


# -------------------------------------------------------------------- files

_BLOCK = 1024 * 1024
"""Bytes per read. A block of this size stays in the processor's cache until it is hashed."""
_PIECE_SIZES: list[int] = [2**power for power in range(14, 24)]
"""Possible numbers of bytes per hash of files in object stores. The last resort is `PIECE`."""
_MAX_HASHES = 2**18
"""Maximum number of hashes in all files of an object store with one name pattern."""
_STORED_AS_BYTES = {"C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""Dtypes that safetensors added after version 2 of the checkpoint format was fixed. They are stored as bytes."""


def get_stored_spec(dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """Return the dtype and shape with which a file stores a tensor.

    A dtype that the file format lacks is stored as a 1-D uint8 tensor. Then only the manifest contains the original
    dtype and shape.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
    """
    if CODES.get(dtype, "C64") in _STORED_AS_BYTES:
        return TensorSpec((prod(shape) * dtype.itemsize,), torch.uint8)
    return TensorSpec(tuple(shape), dtype)


def _choose_piece(specs: Iterable[TensorSpec], num_files: int) -> int:
    """Return the number of bytes that one hash covers in a file in an object store.

    It is at least 8 KiB times `num_files`, and so large that all files together have at most 2^18 hashes. It is the
    smallest such power of two from 16 KiB to 8 MiB, or else 16 MiB.

    Args:
        specs: Shapes and dtypes of the file's tensors.
        num_files: Number of files of about this size that all ranks write.
    """
    max_hashes = max(1, _MAX_HASHES // num_files)
    num_bytes = sum(spec.num_bytes for spec in specs)
    for size in _PIECE_SIZES:
        if size >= 2**13 * num_files and num_bytes <= size * max_hashes:
            return size
    return PIECE


def _list_values(
    specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor if specs[name].dtype == tensor.dtype else get_raw_bytes(tensor)


def write_shards(
    folder: Path, files: Mapping[str, Sequence[tuple[str, torch.Tensor]]], num_files: int = 1
) -> list[WrittenFile]:
    """Write safetensors files, flush them to the disk with fsync, and return their lengths and hashes in order.

    Several threads are used for object stores, and for disks if there are at least 64 MiB to write. Each header is checked
    with `check_header`. `ParallelWriter` documents how much memory this takes.

    Args:
        folder: Folder of the files.
        files: Pairs of (tensor name, values), by file name.
        num_files: Number of files that all ranks write with this name pattern. In object stores, one hash covers 8 KiB
            times `num_files`, rounded up to a power of two and at least 16 KiB, so that a rank that loads its part
            reads few extra bytes. It covers more where all files would otherwise have more than 2^18 hashes. Default:
            1.

    Raises:
        OSError: If the disk is full or not writable.
        CheckpointError: If a load would refuse the header of a written file.
    """
    written: dict[str, tuple[RangedFile, int]] = {}
    num_bytes = sum(tensor.nbytes for tensors in files.values() for _, tensor in tensors)
    is_object = isinstance(folder, ObjectPath)
    with ParallelWriter(THREADS if is_object else count_threads(num_bytes)) as writer:
        for name, tensors in files.items():
            specs = {key: get_stored_spec(tensor.dtype, tensor.shape) for key, tensor in tensors}
            piece = _choose_piece(specs.values(), num_files) if is_object else PIECE
            check = partial(_check_written_header, tensors)
            values = _list_values(specs, tensors)
            written[name] = (
                writer.write(folder / name, specs, values, piece=piece, syncs_to_disk=True, on_written=check),
                piece,
            )
    return [WrittenFile(name, file.num_bytes, tuple(file.digests), piece) for name, (file, piece) in written.items()]


def _check_written_header(tensors: Sequence[tuple[str, torch.Tensor]], file: RangedFile) -> None:
    check_header(file.path, tensors)


class PieceHashes:
    """Hasher for a file that is written in order. Each hash covers one piece of the file.

    Args:
        piece: Number of bytes that one hash covers.
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._current = xxhash.xxh3_128()
        self._digests: list[str] = []
        self._length = 0

    def update(self, view: memoryview) -> None:
        """Hash the next bytes of the file."""
        while view:
            if self._length and self._length % self._piece == 0:
                self._finish_piece()
            part = view[: self._piece - self._length % self._piece]
            self._current.update(part)
            self._length += len(part)
            view = view[len(part) :]

    def _finish_piece(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current = xxhash.xxh3_128()

    def make_entry(self, name: str) -> WrittenFile:
        """Return the manifest's entry for the file, with its length and hashes.

        Call it after the last byte has been hashed.

        Args:
            name: File name, relative to the checkpoint's folder.
        """
        self._finish_piece()
        return WrittenFile(name, self._length, tuple(self._digests), self._piece)


def hash_file(path: Path, name: str) -> WrittenFile:
    """Hash a file that a hook has written, and return its length and hashes. On a disk, flush it with fsync.

    Args:
        path: File to read.
        name: File name, relative to the checkpoint's folder.

    Raises:
        CheckpointError: If the path is not a regular file. Reading another kind of file, such as a pipe, might never
            end.
    """
    digests = PieceHashes()
    view = memoryview(bytearray(_BLOCK))
    with open_regular_file(path) as file:
        if not isinstance(path, ObjectPath):
            os.fsync(file.fileno())
        while count := file.readinto(view):  # type: ignore[attr-defined]
            digests.update(view[:count])
    return digests.make_entry(name)


def check_header(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `CheckpointError` if the header of a written file does not list the given tensors as a load expects them.

    The values are not read back.

    Args:
        path: Written file.
        tensors: Pairs of (name, values) that the file should hold.

    Raises:
        CheckpointError: If a load would refuse the header.
    """
    with open_regular_file(path) as file:
        stored, _ = read_header(file, path)
    for name, tensor in tensors:
        if name not in stored or stored[name][0] != get_stored_spec(tensor.dtype, tensor.shape):
            raise CheckpointError(f"{path} was written and does not hold {name!r} as it is")


def get_view(
    stored: Mapping[str, StoredTensor], path: Path, name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of a mapped file as a view, or as a copy if its dtype is stored as bytes.

    Args:
        stored: Tensors of the mapped file, by key.
        path: Path of the file, for messages.
        name: Key of the tensor in the file.
        dtype: Expected dtype.
        shape: Expected shape.

    Raises:
        CheckpointError: If the file has no tensor under that key, or one of another dtype or shape.
    """
    check_spec(stored.get(name), dtype, shape, path, name)
    tensor = stored[name].tensor()
    # Bytes can begin at any offset in the file. The values of a larger dtype must be aligned, so they are copied.
    return tensor if tensor.dtype == dtype else tensor.clone().view(dtype).reshape(tuple(shape))


def check_spec(stored_spec: TensorSpec | None, dtype: torch.dtype, shape: Sequence[int], path: Path, name: str) -> None:
    """Raise `CheckpointError` if a file's header does not match the manifest's entry of a tensor.

    Args:
        stored_spec: Dtype and shape in the header, or None if the header lacks the tensor.
        dtype: Dtype in the manifest.
        shape: Shape in the manifest.
        path: Path of the file, for messages.
        name: Key of the tensor.

    Raises:
        CheckpointError: If the header lacks the tensor, or its dtype or shape differs.
    """
    if stored_spec is None:
        raise CheckpointError(f"{path} lacks the tensor {name!r} that the manifest places there")
    expected_spec = get_stored_spec(dtype, shape)
    if (stored_spec.shape, stored_spec.dtype) != (expected_spec.shape, expected_spec.dtype):
        raise CheckpointError(
            f"{path}: {name} is {stored_spec.dtype} of {stored_spec.shape}, where the manifest has {dtype} of {tuple(shape)}"
        )
