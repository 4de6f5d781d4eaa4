"""The offload folder: one safetensors file with what cannot be used where it lies, and whose it is."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from headway.common.atomic import replacing
from headway.errors import CheckpointError, ConfigError
from headway.weights.files import WeightFiles, map_safetensors, open_checkpoint
from headway.weights.shards import TensorSpec, raw_bytes, widest_first, write_file

FILE = "offloaded.safetensors"
_OWNER = "headway_owner"


def offload(
    folder: str | Path,
    specs: Mapping[str, TensorSpec],
    owner: str,
    values: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> WeightFiles:
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
    try:
        with replacing(path) as staged:
            write_file(staged, widest_first(specs), values(), {_OWNER: owner})
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    return open_checkpoint(path)


def existing(folder: str | Path | None, specs: Mapping[str, TensorSpec]) -> WeightFiles | None:
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
    found: WeightFiles,
    specs: Mapping[str, TensorSpec],
    owner: str,
    values: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> None:
    _check_names(path, found, specs)
    if owner:
        if map_safetensors(path)[1].get(_OWNER) != owner:
            raise _foreign(path, "they were made from other files")
        return
    for name, value in values():
        stored = found.tensors[name].tensor()
        if not torch.equal(raw_bytes(stored), raw_bytes(value)):
            raise _foreign(path, f"the values of {name} differ")


def _check_names(path: Path, found: WeightFiles, specs: Mapping[str, TensorSpec]) -> None:
    there = {name: TensorSpec(stored.shape, stored.dtype) for name, stored in found.tensors.items()}
    if there != dict(specs):
        odd = sorted(name for name in {*there, *specs} if there.get(name) != specs.get(name))
        raise _foreign(path, f"{odd[0]} is {there.get(odd[0], 'not there')}, wanted: {specs.get(odd[0], 'nothing')}")


def _foreign(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} holds the weights of another model ({reason}); give an empty offload folder, or remove the file if the "
        "other model is not in use"
    )
