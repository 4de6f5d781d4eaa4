"""Weights as plain safetensors files: one, or shards with an index; written beside the old ones, then renamed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headway.bigmodel.files import map_safetensors
from headway.errors import CheckpointError, ConfigError
from headway.units import parse_bytes

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
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in owners:
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
    metadata = {"format": "pt", **tied}
    written = []
    for file, shard in zip(names, shards):
        staged = folder / f".{file}.tmp"
        # safetensors refuses tensors that share memory; copies are made one shard at a time.
        copies = {name: kept[name].detach().cpu().clone().contiguous() for name in shard}
        save_file(copies, staged, metadata=metadata)
        _verify(staged, copies)
        written.append((staged, folder / file))
    for staged, final in written:
        staged.replace(final)
    files = [final for _, final in written]
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        files.append(_write_index(folder, {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}))
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
    staged = path.with_name(f".{path.name}.tmp")
    if safe_serialization:
        if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
            raise ConfigError(
                f"safe_serialization=True got a {type(obj).__name__}; safetensors holds a dict of names and tensors. Pass "
                "safe_serialization=False for other objects"
            )
        kept, tied = untied(obj.items())
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in kept.items()}, staged,
                  metadata={"format": "pt", **tied})  # fmt: skip
    else:
        torch.save(obj, staged)
    staged.replace(path)


def _verify(path: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Does the file hold these tensors, bit by bit?"""
    stored, _ = map_safetensors(path)
    differing = [name for name in wanted if name not in stored or not _is_same(stored[name].tensor(), wanted[name])]
    if differing or len(stored) != len(wanted):
        path.unlink()
        raise CheckpointError(
            f"{path} was written and does not hold what the model has ({', '.join(differing[:3])}); nothing was replaced. "
            "Save to another disk"
        )


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    is_alike = first.dtype == second.dtype and first.shape == second.shape
    return is_alike and torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_index(folder: Path, index: dict[str, Any]) -> Path:
    staged = folder / f".{INDEX}.tmp"
    staged.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return staged.replace(folder / INDEX)


def _remove_stale(folder: Path, current: set[str]) -> None:
    """An earlier save in the same folder must not be found by a later load."""
    for pattern in (SINGLE, INDEX, "model-*-of-*.safetensors", PICKLED):
        for path in folder.glob(pattern):
            if path.name not in current:
                path.unlink()
