"""Weights as plain safetensors files: one, or shards with an index; written beside the old ones, then renamed."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from headway.atomic import replacing, write_text
from headway.errors import CheckpointError, ConfigError
from headway.units import parse_bytes
from headway.weights.files import map_safetensors
from headway.weights.pieces import memory_of
from headway.weights.shards import Spec, is_same, widest_first, write_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


def untied(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split tensors into those to write and {tied name: the name that is written}.

    Names that hold the very same memory in the same layout are tied; views that merely share a buffer are not.
    """
    kept: dict[str, torch.Tensor] = {}
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
    tensors: Iterable[tuple[str, torch.Tensor]], folder: str | Path, max_shard_size: int | str
) -> list[Path]:
    """Write the tensors under their names and return the files.

    Args:
        tensors: (name, tensor) pairs.
        folder: made where missing.
        max_shard_size: bytes, or text such as "10GB".

    Raises:
        ConfigError: the folder is a file.
        CheckpointError: a file does not hold what was written to it; the folder is as it was.
    """
    folder = _folder(folder)
    kept, tied = untied(tensors)
    shards = plan_shards({name: t.numel() * t.element_size() for name, t in kept.items()}, parse_bytes(max_shard_size))
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    with ExitStack() as stack:  # no file is replaced before all are written
        for file, shard in zip(names, shards):
            staged = stack.enter_context(replacing(folder / file))
            _write(staged, {name: kept[name] for name in shard}, tied)
            _verify(staged, {name: kept[name] for name in shard})
    files = [folder / file for file in names]
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        files.append(folder / INDEX)
    _remove_stale(folder, {file.name for file in files})
    return files


def save_pickled(state: dict[str, torch.Tensor], folder: str | Path) -> Path:
    """Write the tensors with torch.save as one `pytorch_model.bin`, in place of earlier saves in the folder.

    Raises:
        ConfigError: the folder is a file.
    """
    folder = _folder(folder)
    save_object(state, folder / PICKLED)
    _remove_stale(folder, {PICKLED})
    return folder / PICKLED


def save_object(obj: Any, path: str | Path, safe_serialization: bool = False) -> None:
    """Write an object with torch.save, or a dict of tensors with safetensors; a reader sees the old file or the new.

    Raises:
        ConfigError: safetensors was asked for, and this is not a dict of tensors.
    """
    path = Path(path)
    if not safe_serialization:
        with replacing(path) as staged:
            torch.save(obj, staged)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise ConfigError(
            f"safe_serialization=True got a {type(obj).__name__}; safetensors holds a dict of names and tensors. Pass "
            "safe_serialization=False for other objects"
        )
    kept, tied = untied(obj.items())
    with replacing(path) as staged:
        _write(staged, kept, tied)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    specs = widest_first({name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    write_file(path, specs, ((name, tensors[name]) for name in specs), tied)


def _verify(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Does the file hold these tensors, bit by bit?"""
    stored, _ = map_safetensors(path)
    differing = [name for name in wanted if name not in stored or not is_same(stored[name].tensor(), wanted[name])]
    if differing or len(stored) != len(wanted):
        raise CheckpointError(
            f"{path} was written and does not hold what the model has ({', '.join(differing[:3])}); nothing was replaced. "
            "Save to another disk"
        )


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_stale(folder: Path, current: set[str]) -> None:
    """An earlier save in the same folder must not be found by a later load."""
    for pattern in (SINGLE, INDEX, "model-*-of-*.safetensors", PICKLED):
        for path in folder.glob(pattern):
            if path.name not in current:
                path.unlink()
