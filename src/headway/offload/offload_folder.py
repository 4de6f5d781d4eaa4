"""Offload folders: Headway's, one safetensors file, and Accelerate's, one raw file a tensor and an index.

Headway's holds what cannot be used where it lies, and whose it is. Accelerate's `index.json` holds {name: {"dtype": "bfloat16",
"shape": [2, 3]}}; an entry may instead point into a safetensors file: {"safetensors_file": path, "weight_name": name there,
"dtype": ...}. Values are C-contiguous, in the machine's byte order.
"""

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headway.common.atomic import replacing, write_text
from headway.common.untrusted import parse_json, printable, read_regular, shown
from headway.errors import CheckpointError, ConfigError
from headway.weights.files import StoredTensor, WeightFiles, map_safetensors, open_checkpoint
from headway.weights.names import assign, places_of, tied_groups
from headway.weights.shards import MAX_HEADER, TensorSpec, dtype_name, raw_bytes, widest_first, write_file

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
        _check_names(path, found, specs)
        if owner and map_safetensors(path)[1].get(_OWNER) != owner:
            raise _foreign(path, "they were made from other files")
        for name, value in () if owner else values():
            if not torch.equal(raw_bytes(found.tensors[name].tensor()), raw_bytes(value)):
                raise _foreign(path, f"the values of {name} differ")
        return found
    try:
        with replacing(path, has_rivals=True) as staged:
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


def _check_names(path: Path, found: WeightFiles, specs: Mapping[str, TensorSpec]) -> None:
    there = {name: TensorSpec(stored.shape, stored.dtype) for name, stored in found.tensors.items()}
    if there != dict(specs):
        odd = sorted(name for name in {*there, *specs} if there.get(name) != specs.get(name))
        raise _foreign(path, f"{odd[0]} is {there.get(odd[0], 'not there')}, wanted: {specs.get(odd[0], 'nothing')}")


def _foreign(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} holds the weights of another model ({reason}); give an empty offload folder, or remove the file"
    )


INDEX = "index.json"
_MOST = 2**60
"""Values of a tensor, which torch could count the bytes of."""
Value = TypeVar("Value")


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | Path, index: dict[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]] | None:
    """Write one tensor to `<offload_folder>/<weight_name>.dat`, by way of a file beside it that takes its place when whole.

    Args:
        weight: any strided tensor with values.
        weight_name: its name in the model.
        offload_folder: exists.
        index: gets the tensor's entry; None: nothing is noted.

    Returns:
        The index given.

    Raises:
        ConfigError: the tensor has no values, or its name is not a file name.
    """
    path = _path(offload_folder, weight_name)
    if weight.is_meta:
        raise ConfigError(f"{weight_name} is on the meta device and has no values to offload; load it first")
    plain = weight.detach().cpu().contiguous()
    with replacing(path, has_rivals=True) as staged, staged.open("wb") as file:
        if plain.numel():
            file.write(plain.flatten().view(torch.uint8).numpy().data)
    if index is not None:
        index[weight_name] = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Map one `.dat` file: nothing is read until it is used, and what is written to the tensor never reaches the file.

    Args:
        weight_file: its path.
        weight_info: its entry in the index, `dtype` and `shape`.

    Raises:
        CheckpointError: the file is missing, or its size is not that of its entry.
    """
    path, (dtype, shape) = Path(weight_file), _entry(str(weight_file), weight_info)
    num_bytes = math.prod(shape) * dtype.itemsize
    size = path.stat().st_size if path.is_file() else None
    # An empty tensor cannot be mapped by those who write this format with numpy; they leave no file or an empty one.
    if num_bytes == 0 and not size:
        return torch.empty(shape, dtype=dtype)
    if size != num_bytes:
        state = "missing" if size is None else f"{size} bytes"
        raise CheckpointError(
            f"{printable(path)} is {state}; its entry says {shown(list(shape))} {dtype}, {num_bytes} bytes; offload again"
        )
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(shape)


def _entry(name: str, info: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = getattr(torch, str(info.get("dtype")), None)
    shape = info.get("shape")
    is_shape = isinstance(shape, list | tuple) and all(type(n) is int and 0 <= n < _MOST for n in shape)
    if not isinstance(dtype, torch.dtype) or not is_shape or math.prod(max(n, 1) for n in shape or ()) >= _MOST:
        raise CheckpointError(
            f"{printable(name)}: the offload index says {shown(dict(info))}; it needs a dtype of torch and a shape"
        )
    assert shape is not None
    return dtype, tuple(shape)


def _path(folder: str | Path, name: str) -> Path:
    if Path(name).name != name or "\0" in name:
        raise ConfigError(f"{name!r} is not a name of a tensor that can be a file in {folder}")
    return Path(folder) / f"{name}.dat"


def read_offload_index(offload_folder: str | Path) -> dict[str, dict[str, Any]]:
    """The folder's `index.json`.

    Raises:
        CheckpointError: there is none, or it is not an index.
    """
    path = Path(offload_folder) / INDEX
    try:
        index = parse_json(read_regular(path, MAX_HEADER))
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read as an offload index ({error})") from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise CheckpointError(f"{path} is not an offload index: it gives no entry for each name")
    return index


def save_offload_index(index: Mapping[str, Mapping[str, object]] | None, offload_folder: str | Path) -> None:
    """Add the entries to the folder's `index.json`, which is whole at any moment; None or nothing writes nothing.

    Raises:
        CheckpointError: the index that is there is damaged.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX
    present = read_offload_index(offload_folder) if path.exists() else {}
    write_text(path, json.dumps({**present, **index}, indent=2), has_rivals=True)


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors and the index. A folder may be filled by several calls, with parts of one model.

    Args:
        save_dir: made where missing.
        state_dict: tensors with values.

    Raises:
        ConfigError: the folder holds another model: one of these names with another shape or dtype. Nothing is written.
    """
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    present = read_offload_index(folder) if (folder / INDEX).exists() else {}
    for name, tensor in state_dict.items():
        _path(folder, name)
        wanted = (tensor.dtype, tuple(tensor.shape))
        if name in present and "safetensors_file" not in present[name] and _entry(name, present[name]) != wanted:
            raise ConfigError(
                f"{folder} holds another {name}: {present[name]}, here {list(tensor.shape)} {tensor.dtype}; give an empty folder"
            )
    index: dict[str, dict[str, Any]] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, folder, index)
    save_offload_index(index, folder)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name: those of a state dict, then those of a folder or an index, mapped and not read.

    Args:
        state_dict: in memory; comes first.
        save_folder: as offload_state_dict() leaves it.
        index: entries of tensors in the folder or in safetensors files; None: the folder's own.
        device: where tensors of safetensors files go; None: the CPU.

    Raises:
        ConfigError: nothing is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError("OffloadedWeightsLoader got no weights; give a state_dict, a save_folder or an index")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._files: dict[str, WeightFiles] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        """The tensor of that name.

        Raises:
            KeyError: there is none.
            CheckpointError: its file is missing or does not fit its entry.
        """
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            return self._from_safetensors(key, info)
        if self.save_folder is None:
            raise ConfigError(f"{key} is in a .dat file, and no save_folder was given")
        return load_offloaded_weight(_path(self.save_folder, key), info)

    def is_mapped(self, key: str, dtype: torch.dtype) -> bool:
        """Does the tensor, of this dtype, lie in a mapped file?"""
        if key in self.state_dict or self.device is not None:
            return False
        info = self.index[key]
        if info.get("safetensors_file") is None:
            return info.get("dtype") == dtype_name(dtype)
        stored = self._stored(key, info)
        return stored.is_mapped and stored.dtype == dtype

    def _from_safetensors(self, key: str, info: Mapping[str, object]) -> torch.Tensor:
        tensor = self._stored(key, info).tensor()
        if "dtype" in info:
            tensor = tensor.to(_entry(key, {"dtype": info["dtype"], "shape": []})[0])
        return tensor if self.device is None else tensor.to(self.device)

    def _stored(self, key: str, info: Mapping[str, object]) -> StoredTensor:
        file, name = str(info["safetensors_file"]), str(info.get("weight_name", key))
        if not Path(file).is_file():
            raise CheckpointError(f"{printable(file)}, which the offload index names for {printable(key)}, is no file")
        if file not in self._files:
            self._files[file] = open_checkpoint(file)
        stored = self._files[file].tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{file} holds no tensor {name!r}, which the offload index names for {key}")
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, Value]):
    """The entries of a mapping whose names begin with a prefix, by the rest of their names.

    Args:
        dataset: any mapping.
        prefix: what every name gets put before it.
    """

    def __init__(self, dataset: Mapping[str, Value], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Value:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, object]] | None, offload_folder: str | Path | None
) -> None:
    """Give the model's tensors the values of an offload folder, mapped where they lie; tied ones are given once.

    Args:
        model: on the meta device or with values, which are replaced.
        index: the entries to load; None or nothing loads nothing.
        offload_folder: where the files are.

    Raises:
        CheckpointError: names that the model does not have, or other shapes or dtypes than its tensors'; the model is
            untouched. A missing or cut file.
    """
    if not index:
        return
    places = places_of(model)
    wrong = [name for name in index if name not in places]
    if wrong:
        raise CheckpointError(f"{type(model).__name__} has no {', '.join(wrong[:5])}; the folder is another model's")
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    values = {name: fitted(name, places[name].tensor, weights[name]) for name in index}
    groups = tied_groups(places)
    for name, value in values.items():
        assign(places, groups[name], value, is_mapped=weights.is_mapped(name, value.dtype))


def fitted(name: str, wanted: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An offloaded value as the model's tensor: itself, or of the model's floating type where only that differs.

    Raises:
        CheckpointError: it has another shape, or cannot be converted without loss of meaning.
    """
    is_near = value.is_floating_point() and wanted.is_floating_point()
    if wanted.shape != value.shape or not (wanted.dtype == value.dtype or is_near):
        raise CheckpointError(
            f"{name} is {list(value.shape)} {value.dtype} in the offload folder and {list(wanted.shape)} {wanted.dtype} in the "
            "model; the folder is another model's"
        )
    return value.to(wanted.dtype)


def extract_submodules_state_dict(state_dict: Mapping[str, Value], submodule_names: Iterable[str]) -> dict[str, Value]:
    """The entries of these modules and of all inside them, in the order of the state dict.

    Args:
        state_dict: by dotted names.
        submodule_names: dotted names of modules (or of tensors).
    """
    wanted = set(submodule_names)

    def is_inside(name: str) -> bool:
        while name:
            if name in wanted:
                return True
            name = name.rpartition(".")[0]
        return False

    return {name: value for name, value in state_dict.items() if is_inside(name)}
