"""Find the checkpoint files that contain weights, validate them completely before use, and memory-map them."""

import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any

import torch

from headway.common.object_path import expand_home
from headway.common.optional import require
from headway.common.untrusted import escape_text, open_regular_file, read_regular_file
from headway.core.weights.pieces import make_slices
from headway.core.weights.safetensors_format import MAX_HEADER, read_header
from headway.core.weights.tensor_bytes import TensorSpec, get_raw_bytes, view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

logger = get_logger(__name__)

EXTRA_STATE = "_extra_state"
"""Key of a module's extra state in its state dict."""
_MANIFEST = "manifest.json"
"""Name of the file that makes a folder a Headway checkpoint."""
_MANIFEST_START = b'{"format":"headway checkpoint"'
"""First bytes of this file."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Pattern of a model's ID on the Hub: "name" or "owner/name"."""


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """Tensor in a checkpoint file. Its values are read on request.

    Attributes:
        shape: Shape in the file.
        dtype: Dtype in the file.
        file: File that contains the values.
        is_mapped: Whether the values can be used directly in the mapped file, without a copy in memory.
    """

    file: Path
    is_mapped: bool
    _data: Any = field(repr=False)
    """Tensor with the values (pickled files), or memory map of the whole file (safetensors)."""
    _offset: int = 0
    """Offset of the values in the memory map, in bytes."""

    def tensor(self) -> torch.Tensor:
        """Return the values on the CPU. Writing to a mapped tensor changes only memory, never the file."""
        if isinstance(self._data, torch.Tensor):
            return self._data
        num_bytes = self.num_bytes
        if not num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self._data, dtype=torch.uint8, count=num_bytes, offset=self._offset)
        return (flat if self.is_mapped else flat.clone()).view(self.dtype).view(self.shape)

    def fill(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read a rectangular block of the tensor into `box`, which may be on any device and of any dtype.

        Values outside of the block are not read.

        Args:
            box: Tensor to fill. Its shape is the shape of the block.
            offsets: First index of the block along each dim.

        Raises:
            CheckpointError: If the file cannot be opened or has become shorter.
            OSError: If the file system reports a failed read.
        """
        if isinstance(self._data, torch.Tensor):
            box.copy_(self._data[make_slices(offsets, box.shape)])
            return
        partial_dims = [dim for dim, (size, full_size) in enumerate(zip(box.shape, self.shape)) if size != full_size]
        # The last dim that the block does not cover completely. From it on, values are contiguous in the file.
        inner = max(partial_dims, default=0)
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(map(mul, offsets, strides))  # index of the block's first element in the flattened tensor
        with open_regular_file(self.file) as file:
            if not box.numel():
                return
            for index in product(*map(range, box.shape[:inner])):
                start = self._offset + (first + sum(map(mul, index, strides))) * self.dtype.itemsize
                self._read_part(file.fileno(), start, box[index])

    def _read_part(self, file: int, start: int, part: torch.Tensor) -> None:
        """Read a part of the tensor that is contiguous in the file.

        Args:
            file: Descriptor of the file.
            start: Offset of the part in the file, in bytes.
            part: Tensor to fill. It can have another dtype than the file, or be on another device.

        Raises:
            CheckpointError: If the file has become shorter.
        """
        is_direct = part.dtype == self.dtype and part.device.type == "cpu" and part.is_contiguous()
        buffer = part if is_direct else torch.empty(part.shape, dtype=self.dtype)
        view = memoryview(get_raw_bytes(buffer).numpy())  # type: ignore[arg-type]
        while view:
            count = os.preadv(file, [view], start)
            if not count:
                raise CheckpointError(f"{self.file} became shorter while it was read")
            view, start = view[count:], start + count
        if buffer is not part and part.dtype == self.dtype:
            view_as_bits(part).copy_(view_as_bits(buffer))
        elif buffer is not part:
            part.copy_(buffer)


@dataclass
class WeightFiles:
    """All tensors of a checkpoint by name, from one or more files.

    Attributes:
        source: Path or ID as given by the caller, for messages.
        tensors: Tensors by their names in the files.
        ties: Mapping from each tied name to the stored name whose values it shares, if the writer recorded it.
        objects: Modules' extra states, by name, if they are not tensors. Only pickled files contain any.
    """

    source: str
    tensors: dict[str, StoredTensor]
    ties: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def verify(self, targets: Mapping[str, Any], others: Sequence[str]) -> None:
        """Compare the bytes that will be read with their hashes. Do nothing here: these formats have no hashes.

        Args:
            targets: This rank's tensors that receive the values, by the names of the stored tensors.
            others: Names of further stored tensors, which are read completely.
        """

    @property
    def files(self) -> list[Path]:
        """Sorted list of the files that contain the tensors."""
        return sorted({stored.file for stored in self.tensors.values()})


def is_headway_checkpoint(folder: Path) -> bool:
    """Whether a local folder is a checkpoint that `save_state` wrote."""
    path = folder / _MANIFEST
    if not os.path.isfile(path):
        return False
    with open_regular_file(path) as file:
        return file.read(len(_MANIFEST_START)) == _MANIFEST_START


def open_checkpoint(source: str | Path) -> WeightFiles:
    """Open a checkpoint that contains weights. Only headers are read, and no code in the files is executed.

    Args:
        source: A file (`.safetensors`, `.bin`, `.pt` or `.pth`), an index (`*.index.json`), a folder with one
            checkpoint, or a model ID on the Hugging Face Hub. A model on the Hub is downloaded or taken from the local
            cache. In folders and on the Hub, safetensors take precedence over pickles.

    Raises:
        CheckpointError: If there is no checkpoint or more than one, a shard is missing, or a file is damaged or would
            execute code. The message names the file. Also if the folder is a Headway checkpoint, which also contains
            the state of optimizers.
        OptionalDependencyMissing: If `source` is a Hub ID and huggingface_hub is not installed.
    """
    path = Path(expand_home(source))
    if not os.path.exists(path):
        path = _download_files(str(source))
    if os.path.isdir(path):
        if is_headway_checkpoint(path):
            raise CheckpointError(
                f"{path} is a checkpoint that save_state wrote, with the state of a run. To load only its weights, call "
                f"accelerator.load_weights(model, {str(path)!r}), or write them to a folder with `headway merge {path} OUTPUT` and "
                "load that folder"
            )
        path = _choose_checkpoint(path)
    if path.name.endswith(".index.json"):
        return _open_sharded(path, str(source))
    opened = _open_file(path)
    return WeightFiles(str(source), opened.tensors, _read_ties(opened.metadata, opened.tensors), opened.objects)


def _choose_checkpoint(folder: Path) -> Path:
    """Return the only checkpoint in a folder: a file with weights, or an index. Safetensors precede pickles.

    Several checkpoints of one format are an error, because one is probably outdated. However, a file named `model` or
    `pytorch_model` is chosen if there is no index.

    Raises:
        CheckpointError: If the folder contains no weights or several checkpoints, or an index is damaged.
    """
    for patterns in (("*.safetensors.index.json", "*.safetensors"), ("*.bin.index.json", "*.bin")):
        indexes = sorted(folder.glob(patterns[0]))
        shards = {name for index in indexes for name in _read_index(index)[0].values()}
        singles = [path for path in sorted(folder.glob(patterns[1])) if path.name not in shards]
        # Training writes these files next to the weights.
        singles = [path for path in singles if path.name not in ("training_args.bin", "optimizer.bin", "scheduler.bin")]
        checkpoints = indexes + singles
        usual = [path for path in singles if path.stem in ("model", "pytorch_model")]
        if not indexes and len(usual) == 1:
            return usual[0]
        if len(checkpoints) == 1:
            return checkpoints[0]
        if checkpoints:
            names = ", ".join(path.name for path in checkpoints[:6])
            raise CheckpointError(
                f"{folder} contains more than one checkpoint ({names}), and one may be stale; give the path of one file"
            )
    raise CheckpointError(f"{folder} contains no weights; looked for *.safetensors, *.bin and their *.index.json")


def _download_files(source: str) -> Path:
    """Return the folder in the local cache that holds a Hub model's weights. Missing files are downloaded.

    Safetensors files are preferred to .bin files.

    Args:
        source: ID of the model, such as "owner/name".

    Raises:
        CheckpointError: If `source` is no such ID, the download fails, or the model has no weights in these formats.
        OptionalDependencyMissing: If huggingface_hub is not installed.
    """
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist, and is not an id of a model on the Hub ('owner/name') either")
    hub = require("huggingface_hub", f"{source!r} is not a local path, and downloading it needs", "huggingface_hub")
    for patterns in (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"]):
        try:
            folder = Path(hub.snapshot_download(source, allow_patterns=patterns))
        except Exception as error:
            raise CheckpointError(
                f"{source!r} is not a local file or folder, and could not be downloaded from the Hub: {error}"
            ) from error
        if any(folder.glob(patterns[0])):
            return folder
    raise CheckpointError(f"{source!r} on the Hub contains neither safetensors nor .bin weights")


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the mapping from tensor names to file names in an index, and its metadata.

    Raises:
        CheckpointError: If the file is not an index, or names files outside of its folder.
    """
    try:
        content = json.loads(read_regular_file(index, MAX_HEADER))
        weights, metadata = content["weight_map"], content.get("metadata") or {}
        is_sound = isinstance(weights, dict) and all(isinstance(name, str) for name in weights.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no index of a sharded checkpoint ({error!r})") from error
    if not is_sound or not isinstance(metadata, dict):
        raise CheckpointError(f"{index}: no index of a sharded checkpoint; its weight_map gives no file names")
    outside = sorted(name for name in set(weights.values()) if Path(name).name != name or name == "..")
    if outside:
        raise CheckpointError(
            f"{index}: names files outside of its folder ({', '.join(map(repr, outside[:3]))}); nothing was read"
        )
    return weights, metadata


def _open_sharded(index: Path, source: str) -> WeightFiles:
    """Open the files that an index lists, after checking that each tensor is in the file that the index names.

    Args:
        index: Index file.
        source: Path or ID as given by the caller, for messages.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is not in its file.
    """
    weights, metadata = _read_index(index)
    files = sorted(set(weights.values()))
    missing = [name for name in files if not os.path.isfile(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(files)} shards are missing: {escape_text(', '.join(missing[:5]))}; copy them there"
        )
    shards = {name: _open_file(index.parent / name) for name in files}
    misplaced = [
        escape_text(f"{name} (in {file})") for name, file in weights.items() if not shards[file].has_entry(name)
    ]
    if misplaced:
        raise CheckpointError(
            f"{index}: the index does not fit its shards; {len(misplaced)} tensors are not in the shard that it names: "
            f"{', '.join(misplaced[:5])}"
        )
    tensors = {name: found for name, file in weights.items() if (found := shards[file].tensors.get(name)) is not None}
    objects = {name: shards[file].objects[name] for name, file in weights.items() if name not in tensors}
    all_metadata: dict[str, Any] = {}
    for shard in shards.values():
        all_metadata |= shard.metadata
    all_metadata |= metadata  # the index takes precedence
    return WeightFiles(source, tensors, _read_ties(all_metadata, tensors), objects)


def _read_ties(metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """Return the tied names that a file's metadata records, each with the name of the stored tensor.

    Other entries of the metadata, such as `{"format": "pt"}`, are left out.

    Args:
        metadata: Metadata of a file or an index. It is untrusted.
        tensors: Stored tensors by name.
    """
    return {
        name: target
        for name, target in metadata.items()
        if name not in tensors and isinstance(target, str) and target in tensors
    }


@dataclass
class _OpenedFile:
    """Content of one file of weights.

    Attributes:
        tensors: Tensors by name.
        metadata: Metadata in the header of a safetensors file. Empty for pickled files.
        objects: Modules' extra states that are not tensors, by name. Only pickled files have any.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def has_entry(self, name: str) -> bool:
        """Whether the file contains a tensor or an object of this name."""
        return name in self.tensors or name in self.objects


def _open_file(path: Path) -> _OpenedFile:
    """Open one file of weights, by its suffix. Values are read later if the file can be mapped.

    Raises:
        CheckpointError: If it is no regular file, has another suffix, or is damaged.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a regular file; nothing was read from it")
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_pickled(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: weights are read from .safetensors, .bin, .pt and .pth files")
    return _OpenedFile(*map_safetensors(path))


def is_extra_state(name: str) -> bool:
    """Whether a state-dict key belongs to a module's `get_extra_state` value."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _open_pickled(path: Path) -> _OpenedFile:
    """Open a file that torch.save has written. A zip archive is mapped. Code in the file is not executed.

    Raises:
        CheckpointError: If torch refuses the file, or its content is not a dict of tensors and extra states.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:
        # Any error that torch raises for a malicious or damaged file must name the file.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) refuses this file ({reason}). It is damaged, or contains code, which was not "
            "executed. Ask its author for safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path}: contains a {type(state).__name__} that is not a dict of names and tensors")
    objects = {n: value for n, value in state.items() if is_extra_state(n) and not isinstance(value, torch.Tensor)}
    invalid_name = next(
        (n for n, value in state.items() if n not in objects and not isinstance(value, torch.Tensor)), None
    )
    if invalid_name is not None:
        raise CheckpointError(
            f"{path}: {invalid_name!r} is a {type(state[invalid_name]).__name__}, but a dict of weights contains only tensors"
        )
    tensors = {name: value for name, value in state.items() if name not in objects}
    return _OpenedFile(dict(_wrap_pickled_tensors(path, tensors)), objects=objects)


def _wrap_pickled_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file that torch.save has written, as pairs of (name, stored tensor).

    Raises:
        CheckpointError: If one of them is not a plain CPU tensor.
    """
    is_zip = _is_zip(path)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{path}: {name!r} is not a plain tensor (layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}, "
                f"nested: {tensor.is_nested}); weights must be plain CPU tensors"
            )
        # A view of the mapped file needs contiguous values at a multiple of their size. Archives may place them elsewhere.
        is_mapped = is_zip and tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0
        yield name, StoredTensor(tuple(tensor.shape), tensor.dtype, path, is_mapped, tensor.detach())


def _is_zip(path: Path) -> bool:
    """Whether a file is a zip archive, as torch.save has written since torch 1.6."""
    with open_regular_file(path) as file:
        return file.read(2) == b"PK"


def map_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Memory-map a safetensors file of any name, after checking its header against the file's length.

    Returns:
        Pair of (tensors by name, the file's metadata).

    Raises:
        CheckpointError: If the file cannot be opened or violates the format. The message names the file.
    """
    with open_regular_file(path) as file:
        places, metadata = read_header(file, path)
        try:
            # A private mapping: a page is read from the file when it is first used, and a write changes only a copy.
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be mapped: {error.strerror or error}") from error
    tensors = {
        name: StoredTensor(spec.shape, spec.dtype, path, start % spec.dtype.itemsize == 0, view, start)
        for name, (spec, start) in places.items()
    }
    return tensors, metadata
