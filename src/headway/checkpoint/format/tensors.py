"""Tensors in files: every layout taken apart into dense ones and put together again; written, hashed, proved and mapped.

Tensors of every layout as dense ones, and back: sparse and quantized tensors are taken apart; what cannot be held is refused.

A checkpoint's files: safetensors, hashed in pieces as they are written, proved when done, and read by memory map.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headway.checkpoint.format.manifest import PIECE, WrittenFile
from headway.common.object_path import ObjectPath
from headway.common.untrusted import open_regular
from headway.errors import CheckpointError
from headway.weights.files import StoredTensor
from headway.weights.shards import CODES, TensorSpec, bits, dtype_name, raw_bytes, read_header, write_file

_COMPRESSED: dict[str, tuple[str, str]] = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of its own."""
    return bits(tensor).clone().view(tensor.dtype)


def is_unmade(tensor: torch.Tensor) -> bool:
    """Is it a parameter or buffer of a lazy module, without a shape yet?"""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def refusal(tensor: torch.Tensor) -> str | None:
    """Why a checkpoint cannot hold this tensor's values, and what to do; None where it can."""
    kind = type(tensor)
    if is_unmade(tensor):
        return "a parameter without values yet (of a lazy module): run one forward before the save"
    if tensor.is_nested:
        return "a nested tensor: save what unbind() returns"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, which keeps its values elsewhere: save the plain tensors in it"
        )
    if tensor.is_meta:
        return "a tensor of the meta device, which has no values: load or initialise it before the save"
    if any(getattr(tensor, "names", ())):
        return "a tensor with named dimensions, which would be lost: save tensor.rename(None)"
    if tensor.is_quantized:
        scheme = _scheme(tensor)
        is_held = scheme in _SCHEMES and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32)
        return None if is_held else f"a quantized tensor of {tensor.dtype} with {scheme or 'no scale'}: save its parts"
    if tensor.layout not in (torch.strided, torch.sparse_coo) and _layout(tensor) not in _COMPRESSED:
        return f"a {tensor.layout} tensor: save tensor.to_dense()"
    return None


def _scheme(tensor: torch.Tensor) -> Any:
    try:
        return tensor.qscheme()
    except RuntimeError:  # e.g. made by torch.empty
        return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Is it no more than its values in order?"""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def take_apart(tensor: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What describes a sparse or quantized tensor, of plain values, and the dense tensors that it is made of."""
    if tensor.is_quantized:
        values, dtype = tensor.int_repr(), dtype_name(tensor.dtype)
        if tensor.qscheme() == torch.per_tensor_affine:
            about = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return {"layout": "quantized", "dtype": dtype, **about}, [values]
        about = {"axis": tensor.q_per_channel_axis()}
        scales = [values, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return {"layout": "quantized", "dtype": dtype, **about}, scales
    shape, layout = list(tensor.shape), _layout(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return {"layout": layout, "shape": shape, "is_coalesced": tensor.is_coalesced()}, parts
    outer, inner = _COMPRESSED[layout]
    return {"layout": layout, "shape": shape}, [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]


def put_together(about: Mapping[str, Any], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that `take_apart` was given.

    Raises:
        CheckpointError, RuntimeError, LookupError, TypeError, ValueError: these are not its results.
    """
    layout = about["layout"]
    if layout == "quantized":
        values, dtype = parts[0], getattr(torch, about["dtype"])
        if len(parts) == 1:
            make: Callable[..., torch.Tensor] = torch._make_per_tensor_quantized_tensor
            made = make(values, about["scale"], about["zero_point"])
        else:
            made = torch._make_per_channel_quantized_tensor(values, parts[1], parts[2], about["axis"])
        if made.dtype != dtype:
            raise CheckpointError(f"the manifest says {dtype} of a quantized tensor of {made.dtype}")
        return made
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


_BLOCK = 1024 * 1024
"""What is read at once stays in the processor's cache until it is hashed."""
_PIECES, _MOST_PIECES = [2**power for power in range(14, 24)], 2**18
"""Sizes of pieces in an object store, and how many hashes a manifest has of a kind of file."""
_LATER = {"C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""What came to safetensors after version 2 of our format was fixed, and is kept as bytes as it was then."""


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    """How a file holds such a tensor: as it is, or as its bytes, where only the manifest knows what they are."""
    if CODES.get(dtype, "C64") in _LATER:
        return TensorSpec((prod(shape) * dtype.itemsize,), torch.uint8)
    return TensorSpec(tuple(shape), dtype)


def write_shard(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], num_files: int = 1) -> WrittenFile:
    """Write the tensors to `path`, force them to the disk, and say what was written.

    Memory: one tensor's copy at a time for those that are not contiguous on the host; none for the others. To an object store
    besides one part a thread.

    Args:
        path: the file.
        tensors: (name, values).
        num_files: how many files of its kind there are. In object stores a piece has 8 KiB for each of them, 16 KiB or more, so that
            what a rank reads beyond its own bytes stays small; all files together have 2^18 pieces at most.

    Raises:
        OSError: the disk is full, or not writable.
    """
    specs = {name: stored_as(tensor.dtype, tensor.shape) for name, tensor in tensors}
    piece = PIECE
    if isinstance(path, ObjectPath):
        most = max(1, _MOST_PIECES // num_files)
        total = sum(spec.num_bytes for spec in specs.values())
        piece = next((size for size in _PIECES if size >= 2**13 * num_files and total <= size * most), PIECE)
    digests = PieceHashes(piece)
    values = ((name, tensor if specs[name].dtype == tensor.dtype else raw_bytes(tensor)) for name, tensor in tensors)
    write_file(path, specs, values, passing=digests.update, is_forced=True)
    return digests.written(path.name)


class PieceHashes:
    """The hashes of a file's pieces, of bytes that come in order.

    Args:
        piece: bytes of a piece.
    """

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._current = xxhash.xxh3_128()
        self._digests: list[str] = []
        self._length = 0

    def update(self, view: memoryview) -> None:
        """Hash this too."""
        while view:
            if self._length and self._length % self._piece == 0:
                self._next()
            part = view[: self._piece - self._length % self._piece]
            self._current.update(part)
            self._length += len(part)
            view = view[len(part) :]

    def _next(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current = xxhash.xxh3_128()

    def written(self, name: str) -> WrittenFile:
        """The file, now that all of it has come."""
        self._next()
        return WrittenFile(name, self._length, tuple(self._digests), self._piece)


def describe(path: Path, name: str) -> WrittenFile:
    """What lies in a file that somebody else wrote, forced to the disk.

    Raises:
        CheckpointError: it is not a regular file, and may never end.
    """
    digests = PieceHashes()
    view = memoryview(bytearray(_BLOCK))
    with open_regular(path) as file:
        if not isinstance(path, ObjectPath):
            os.fsync(file.fileno())
        while count := file.readinto(view):  # type: ignore[attr-defined]
            digests.update(view[:count])
    return digests.written(name)


def prove_shard(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Open a file as a load will, and compare what it says of its tensors; their values are hashed, and not read.

    Raises:
        CheckpointError: it could not be loaded.
    """
    with open_regular(path) as file:
        stored, _ = read_header(file, path)
    for name, tensor in tensors:
        if name not in stored or stored[name][0] != stored_as(tensor.dtype, tensor.shape):
            raise CheckpointError(f"{path} was written and does not hold {name!r} as it is")


def view_of(
    stored: Mapping[str, StoredTensor], path: Path, name: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor of a mapped file, as a view of it.

    Raises:
        CheckpointError: the file holds another one, or none of that name.
    """
    check_spec(stored.get(name), dtype, shape, path, name)
    tensor = stored[name].tensor()
    # Bytes may begin anywhere in the file, a dtype's values may not.
    return tensor if tensor.dtype == dtype else tensor.clone().view(dtype).reshape(tuple(shape))


def check_spec(found: TensorSpec | None, dtype: torch.dtype, shape: Sequence[int], path: Path, name: str) -> None:
    """Is what a file holds under a name (None: nothing) what the manifest says?

    Raises:
        CheckpointError: it is not.
    """
    if found is None:
        raise CheckpointError(f"{path} lacks the tensor {name!r} that the manifest places there")
    wanted = stored_as(dtype, shape)
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise CheckpointError(
            f"{path}: {name} is {found.dtype} of {found.shape}, where the manifest has {dtype} of {tuple(shape)}"
        )
