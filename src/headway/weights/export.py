"""Weights as plain safetensors files: one, or shards with an index; written beside the old ones, then renamed."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from headway.common.atomic import replacing, write_text
from headway.common.object_path import to_path, writable
from headway.common.text import parse_bytes
from headway.errors import CheckpointError, ConfigError
from headway.weights.files import map_safetensors
from headway.weights.pieces import memory_of
from headway.weights.shards import TensorSpec, is_same, raw_bytes, widest_first, write_file

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


class LazyFullTensor(Protocol):
    """A tensor that is not in memory as a whole.

    Attributes:
        shape: of the whole.
        dtype: of its values.
    """

    shape: torch.Size
    dtype: torch.dtype

    def whole(self) -> torch.Tensor:
        """All of it."""


def untied(tensors: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split tensors into those to write and {tied name: the name that is written}.

    Names that hold the very same memory in the same layout are tied; views that merely share a buffer are not.
    """
    kept: dict[str, Any] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        key = memory_of(tensor)
        if prod(tensor.shape) and key in owners:
            tied[name] = owners[key]
        else:
            owners[key] = name
            kept[name] = tensor
    return kept, tied


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """Names in order, cut into shards of at most `max_shard_size` bytes; a tensor larger than that gets one of its own.

    The cuts are those of huggingface_hub's split_torch_state_dict_into_shards, by the same rules: a tensor that is too
    large stands before the shard that was being filled when it came, and that shard is filled further.
    """
    shards: list[list[str]] = []
    filling: list[str] = []
    room = max_shard_size
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if size > room:
            shards.append(filling)
            filling, room = [], max_shard_size
        filling.append(name)
        room -= size
    return [*shards, filling] if filling or not shards else shards


def save_weights(
    tensors: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]], folder: str | Path, max_shard_size: int | str
) -> list[Path]:
    """Write the tensors under their names and return the files.

    Args:
        tensors: (name, tensor) pairs; what is not in memory yet is put together when its turn comes.
        folder: made where missing.
        max_shard_size: bytes, or text such as "10GB".

    Raises:
        ConfigError: the folder is a file.
        CheckpointError: a file does not hold what was written to it; the folder is as it was.
    """
    place = _folder(folder)
    with writable(place) as local:
        files = [place / name for name in _save(tensors, local, max_shard_size)]
    _remove_stale(place, {file.name for file in files})
    return files


def _save(tensors: Iterable[tuple[str, Any]], folder: Path, max_shard_size: int | str) -> list[str]:
    """Write the files; returns their names."""
    kept, tied = untied(tensors)
    shards = _shards_of(kept, max_shard_size)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    with ExitStack() as stack:  # no file is replaced before all are written
        for file, shard in zip(names, shards):
            logger.info("writing %s", folder / file)
            staged = stack.enter_context(replacing(folder / file))
            part = {name: kept[name] for name in shard}
            _verify(staged, part, _write(staged, part, tied))
    if len(shards) > 1:
        total = sum(_spec(tensor).num_bytes for tensor in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        names.append(INDEX)
    return names


def save_pickled(state: dict[str, torch.Tensor], folder: str | Path) -> Path:
    """Write the tensors with torch.save as one `pytorch_model.bin`, in place of earlier saves in the folder.

    Raises:
        ConfigError: the folder is a file.
    """
    place = _folder(folder)
    save_object(state, place / PICKLED)
    _remove_stale(place, {PICKLED})
    return place / PICKLED


def save_object(obj: Any, path: str | Path, safe_serialization: bool = False) -> None:
    """Write an object with torch.save, or a dict of tensors with safetensors; a reader sees the old file or the new.

    Raises:
        ConfigError: safetensors was asked for, and this is not a dict of tensors.
    """
    if safe_serialization and not _is_state(obj):
        raise ConfigError(
            f"safe_serialization=True got a {type(obj).__name__}; safetensors holds a dict of names and tensors. Pass "
            "safe_serialization=False for other objects"
        )
    path = to_path(path)
    with writable(path.parent) as folder, replacing(folder / path.name) as staged:
        if safe_serialization:
            _write(staged, *untied(obj.items()))
        else:
            torch.save(obj, staged)


def _is_state(obj: Any) -> bool:
    return isinstance(obj, Mapping) and all(isinstance(value, torch.Tensor) for value in obj.values())


def _shards_of(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[list[str]]:
    return plan_shards({name: _spec(each).num_bytes for name, each in tensors.items()}, parse_bytes(max_shard_size))


def order_of(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[str]:
    """The names in the order in which `save_weights` writes them; none of them is tied to another."""
    shards = _shards_of(tensors, max_shard_size)
    return [name for shard in shards for name in widest_first({each: _spec(tensors[each]) for each in shard})]


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _write(path: Path, tensors: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, str]:
    """Write a file; returns the hashes of the values that were put together for it."""
    specs = widest_first({name: _spec(tensor) for name, tensor in tensors.items()})
    hashes: dict[str, str] = {}

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in specs:
            tensor = tensors[name]
            if not isinstance(tensor, torch.Tensor):
                tensor = tensor.whole()
                hashes[name] = _hash(tensor)
            yield name, tensor
            del tensor  # before the next one is put together

    write_file(path, specs, values(), tied)
    return hashes


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(memoryview(raw_bytes(tensor).numpy())).hexdigest()  # type: ignore[arg-type]


def _verify(path: Path, wanted: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Does the file hold these tensors, bit by bit?"""
    stored, _ = map_safetensors(path)

    def is_held(name: str) -> bool:
        if name not in stored:
            return False
        tensor = stored[name].tensor()
        return _hash(tensor) == hashes[name] if name in hashes else is_same(tensor, wanted[name])

    differing = [name for name in wanted if not is_held(name)]
    if differing or len(stored) != len(wanted):
        raise CheckpointError(
            f"{path} does not hold what was written ({', '.join(differing[:3])}); nothing was replaced. Save to another disk"
        )


def _folder(path: str | Path) -> Path:
    folder = to_path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_stale(folder: Path, current: set[str]) -> None:
    """An earlier save in the same folder must not be found by a later load."""
    stale = (SINGLE, INDEX, "model-*-of-*.safetensors", PICKLED)
    for path in list(folder.iterdir()):
        if path.name not in current and any(fnmatch(path.name, pattern) for pattern in stale):
            path.unlink()
