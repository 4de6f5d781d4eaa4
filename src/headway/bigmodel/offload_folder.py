"""The offload folder: one safetensors file with what cannot be used where it lies, and whose it is."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.bigmodel.files import DTYPE_NAMES, Checkpoint, open_checkpoint
from headway.errors import CheckpointError, ConfigError

FILE = "offloaded.safetensors"
_OWNER = "headway_owner"


@dataclass(frozen=True)
class Spec:
    """What will be written under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def offload(
    folder: str | Path, specs: Mapping[str, Spec], owner: str, values: Callable[[], Iterable[tuple[str, torch.Tensor]]]
) -> Checkpoint:
    """Write tensors to the folder, one in memory at a time, and return them mapped; what is already there is used again.

    Args:
        folder: made where missing.
        specs: names, shapes and dtypes of all that `values` gives, in any order.
        owner: says whose values these are; "" where only the values themselves tell, which are then compared.
        values: gives (name, tensor) pairs, of the dtypes in `specs`.

    Raises:
        ConfigError: the folder holds another model's weights, or is a file.
        CheckpointError: it could not be written.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ConfigError(f"the offload folder {folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if path.exists():
        found = open_checkpoint(path)
        _check_owner(path, found, specs, owner, values)
        return found
    staged = folder / f".{FILE}.tmp"
    try:
        _write(staged, specs, owner, values())
        staged.replace(path)
    except OSError as error:
        raise CheckpointError(f"{staged} could not be written: {error}") from error
    finally:
        staged.unlink(missing_ok=True)
    return open_checkpoint(path)


def existing(folder: str | Path | None, specs: Mapping[str, Spec]) -> Checkpoint | None:
    """What an earlier run offloaded to the folder, where it is all of `specs`; None where there is nothing.

    Raises:
        ConfigError: the folder holds the weights of a model with other names, shapes or dtypes.
    """
    if folder is None or not (Path(folder) / FILE).exists():
        return None
    found = open_checkpoint(Path(folder) / FILE)
    _check_names(Path(folder) / FILE, found, specs)
    return found


def _check_owner(
    path: Path,
    found: Checkpoint,
    specs: Mapping[str, Spec],
    owner: str,
    values: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> None:
    _check_names(path, found, specs)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    if owner:
        if header.get("__metadata__", {}).get(_OWNER) != owner:
            raise _foreign(path, "they were made from other files")
        return
    for name, value in values():
        stored = found.tensors[name].tensor()
        if not torch.equal(stored.view(torch.uint8).flatten(), _bytes(value)):
            raise _foreign(path, f"the values of {name} differ")


def _check_names(path: Path, found: Checkpoint, specs: Mapping[str, Spec]) -> None:
    there = {name: Spec(stored.shape, stored.dtype) for name, stored in found.tensors.items()}
    if there != dict(specs):
        odd = sorted(name for name in {*there, *specs} if there.get(name) != specs.get(name))
        raise _foreign(path, f"{odd[0]} is {there.get(odd[0], 'not there')}, wanted: {specs.get(odd[0], 'nothing')}")


def _foreign(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} holds the weights of another model ({reason}); give an empty offload folder, or remove the file if the "
        "other model is not in use"
    )


def _write(path: Path, specs: Mapping[str, Spec], owner: str, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    # Widest elements first: every tensor then begins at a multiple of its element size, so that it can be mapped.
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", _OWNER: owner}}
    offsets, end = dict[str, int](), 0
    for name in order:
        spec = specs[name]
        offsets[name], begin = end, end
        end += torch.Size(spec.shape).numel() * spec.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the values begin at a multiple of 64 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start, left = 8 + len(text), set(specs)
        for name, value in values:
            if (tuple(value.shape), value.dtype) != (specs[name].shape, specs[name].dtype):
                raise CheckpointError(f"{name} to offload is {list(value.shape)} {value.dtype}, wanted {specs[name]}")
            file.seek(start + offsets[name])
            if value.numel():
                file.write(_bytes(value).numpy().data)
            left.discard(name)
    if left:
        raise CheckpointError(f"{path}: no values came for {', '.join(sorted(left)[:5])}")


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8)
