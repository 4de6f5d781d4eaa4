"""Checkpoints on disk: found, checked in full before use, and mapped into memory instead of read."""

import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any

import torch

from headway.common.optional import require
from headway.common.untrusted import open_regular, printable, read_regular
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.weights.pieces import slices
from headway.weights.shards import MAX_HEADER, TensorSpec, bits, raw_bytes, read_header

logger = get_logger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """One tensor of a checkpoint.

    Attributes:
        shape: as stored.
        dtype: as stored.
        file: where it lies.
        is_mapped: its values can be used where they lie in the file, without a copy in memory.
    """

    file: Path
    is_mapped: bool
    _origin: Any = field(repr=False)
    _offset: int = 0

    def tensor(self) -> torch.Tensor:
        """The values, on the CPU. Written to, a mapped tensor changes in memory only, never in the file."""
        if isinstance(self._origin, torch.Tensor):
            return self._origin
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(self._origin, dtype=torch.uint8, count=self.num_bytes, offset=self._offset)
        return (flat if self.is_mapped else flat.clone()).view(self.dtype).view(self.shape)

    def fill(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read the values of a box that begins there, and no others, into memory of its shape, on any device and of any dtype.

        Raises:
            CheckpointError: the file cannot be read, or became shorter.
        """
        if isinstance(self._origin, torch.Tensor):
            box.copy_(self._origin[slices(offsets, box.shape)])
            return
        # Values lie in a row from the last dim on that the box does not take up as a whole.
        inner = max((dim for dim, sizes in enumerate(zip(box.shape, self.shape)) if sizes[0] != sizes[1]), default=0)
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(map(mul, offsets, strides))
        with open_regular(self.file) as file:
            for index in product(*map(range, box.shape[:inner])) if box.numel() else ():
                start = self._offset + (first + sum(map(mul, index, strides))) * self.dtype.itemsize
                self._read(file.fileno(), start, box[index])

    def _read(self, file: int, start: int, part: torch.Tensor) -> None:
        is_straight = part.dtype == self.dtype and part.device.type == "cpu" and part.is_contiguous()
        room = part if is_straight else torch.empty(part.shape, dtype=self.dtype)
        view = memoryview(raw_bytes(room).numpy())  # type: ignore[arg-type]
        while view:
            count = os.preadv(file, [view], start)
            if not count:
                raise CheckpointError(f"{self.file} became shorter while it was read")
            view, start = view[count:], start + count
        if room is not part:
            bits(part).copy_(bits(room)) if part.dtype == self.dtype else part.copy_(room)


@dataclass
class WeightFiles:
    """All tensors of a checkpoint by name, from one file or many.

    Attributes:
        source: what was given, for messages.
        tensors: by the names in the files.
        ties: {name: the stored name whose values it shares}, where the writer said so.
    """

    source: str
    tensors: dict[str, StoredTensor]
    ties: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in the order of their names."""
        return sorted({stored.file for stored in self.tensors.values()})


def open_checkpoint(source: str | Path) -> WeightFiles:
    """Open a checkpoint; nothing is read but headers, and nothing in it is executed.

    Args:
        source: a `.safetensors` or `.bin` file, an index (`*.index.json`), a folder with one checkpoint, or the id of
            a model on the Hugging Face Hub, which is downloaded or taken from the local cache. Safetensors come before
            pickles.

    Raises:
        CheckpointError: there is none or more than one, a shard is missing, or a file is damaged or would execute
            code; the message names the file.
        OptionalDependencyMissing: a Hub id, and huggingface_hub is not installed.
    """
    path = Path(source)
    if not os.path.exists(path):
        path = _download(str(source))
    if os.path.isdir(path):
        path = _choose(path)
    if path.name.endswith(".index.json"):
        return _open_sharded(path, str(source))
    tensors, metadata = _open_file(path)
    return WeightFiles(str(source), tensors, _ties(metadata, tensors))


def _choose(folder: Path) -> Path:
    """The one checkpoint in a folder. Two of one kind are never guessed between: one of them is stale."""
    for patterns in (("*.safetensors.index.json", "*.safetensors"), ("*.bin.index.json", "*.bin")):
        indexes = sorted(folder.glob(patterns[0]))
        shards = {name for index in indexes for name in _read_index(index)[0].values()}
        singles = [path for path in sorted(folder.glob(patterns[1])) if path.name not in shards]
        # Training writes these beside the weights.
        singles = [path for path in singles if path.name not in ("training_args.bin", "optimizer.bin", "scheduler.bin")]
        found = indexes + singles
        usual = [path for path in singles if path.stem in ("model", "pytorch_model")]
        if not indexes and len(usual) == 1:
            return usual[0]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:6])
            raise CheckpointError(
                f"{folder} holds more than one checkpoint ({names}), and one may be stale; give the file that is meant"
            )
    raise CheckpointError(f"{folder} holds no weights; looked for *.safetensors, *.bin and their *.index.json")


def _download(source: str) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist, and is not an id of a model on the Hub ('owner/name') either")
    hub = require("huggingface_hub", f"{source!r} is not a local path, and downloading it needs", "huggingface_hub")
    for patterns in (["*.safetensors", "*.safetensors.index.json"], ["*.bin", "*.bin.index.json"]):
        try:
            folder = Path(hub.snapshot_download(source, allow_patterns=patterns))
        except Exception as error:
            raise CheckpointError(
                f"{source!r} is not a local file or folder, and could not be had from the Hub: {error}"
            ) from error
        if any(folder.glob(patterns[0])):
            return folder
    raise CheckpointError(f"{source!r} on the Hub holds neither safetensors nor .bin weights")


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        content = json.loads(read_regular(index, MAX_HEADER))
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
    weights, metadata = _read_index(index)
    files = sorted(set(weights.values()))
    absent = [name for name in files if not os.path.isfile(index.parent / name)]
    if absent:
        raise CheckpointError(
            f"{index}: {len(absent)} of {len(files)} shards are missing: {printable(', '.join(absent[:5]))}; copy them there"
        )
    shards = {name: _open_file(index.parent / name) for name in files}
    lost = [printable(f"{name} (in {file})") for name, file in weights.items() if name not in shards[file][0]]
    if lost:
        raise CheckpointError(
            f"{index}: the index does not fit its shards; {len(lost)} tensors are not where it says: {', '.join(lost[:5])}"
        )
    tensors = {name: shards[file][0][name] for name, file in weights.items()}
    said = {**{k: v for _, notes in shards.values() for k, v in notes.items()}, **metadata}
    return WeightFiles(source, tensors, _ties(said, tensors))


def _ties(metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, str]:
    return {k: v for k, v in metadata.items() if k not in tensors and isinstance(v, str) and v in tensors}


def _open_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a regular file; nothing was read from it")
    if path.suffix in (".bin", ".pt", ".pth"):
        return dict(_open_pickled(path)), {}
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: weights are read from .safetensors, .bin, .pt and .pth files")
    return map_safetensors(path)


def _open_pickled(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:
        # Whatever torch meets in a hostile or damaged file, the caller needs to know which file it was.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) refuses this file ({reason}); it is damaged, or holds code, of which "
            "nothing was executed. Ask its author for safetensors"
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path}: holds a {type(state).__name__} that is not a dict of names and tensors")
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{path}: {name!r} is not a plain tensor ({tensor.layout}, {tensor.device}), which weights are"
            )
        is_mapped = _is_zip(path) and tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0
        yield name, StoredTensor(tuple(tensor.shape), tensor.dtype, path, is_mapped, tensor.detach())


def _is_zip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(2) == b"PK"


def map_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Map a safetensors file of any name, after checking all that its header says against its length.

    Returns:
        its tensors by name, and its metadata.

    Raises:
        CheckpointError: the file breaks a rule of the format; the message names it.
    """
    with open_regular(path) as file:
        places, metadata = read_header(file, path)
        # A private mapping: pages come from the file when touched, and a write makes a copy of its page.
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {
        name: StoredTensor(spec.shape, spec.dtype, path, start % spec.dtype.itemsize == 0, view, start)
        for name, (spec, start) in places.items()
    }
    return tensors, metadata
