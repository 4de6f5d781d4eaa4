"""Read and write offload folders: Headway's single safetensors file, and Accelerate's raw files with an index.

Headway's file contains tensors that cannot be used directly from a checkpoint's files, and an identifier of the source
from which they were made. Accelerate's folder has one raw file per tensor. Its `index.json` has the form
{name: {"dtype": "bfloat16", "shape": [2, 3]}}. An entry can also refer to a safetensors file:
{"safetensors_file": path, "weight_name": name in that file, "dtype": ...}. Values are C-contiguous, in the byte order
of the machine.
"""

import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headway.common.atomic import open_replacement, write_text
from headway.common.object_path import expand_home
from headway.common.untrusted import escape_text, parse_json, read_regular_file, shorten_repr
from headway.core.weights.files import StoredTensor, WeightFiles, map_safetensors, open_checkpoint
from headway.core.weights.locations import assign_value, map_locations, map_ties
from headway.core.weights.safetensors_format import MAX_HEADER, order_widest_first, write_file
from headway.core.weights.tensor_bytes import TensorSpec, get_dtype_name, get_raw_bytes
from headway.errors import CheckpointError, ConfigError

FILE = "offloaded.safetensors"
"""Name of the safetensors file in Headway's offload folder."""
_OWNER = "headway_owner"
"""Metadata key of the identifier of the source from which a folder's tensors were made."""

INDEX = "index.json"
"""Name of the index file in Accelerate's offload folder."""
_MOST = 2**60
"""Upper limit for the number of elements of a tensor, so that the number of bytes does not overflow in torch."""
Value = TypeVar("Value")
"""Type variable for the values of a mapping."""


def offload_tensors(
    folder: str | Path,
    specs: Mapping[str, TensorSpec],
    owner: str,
    values: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> WeightFiles:
    """Write tensors to an offload folder, and return them mapped from the folder's file.

    If the folder already contains these tensors, they are not written again. Only one tensor at a time is in memory.

    Args:
        folder: Folder to write to. It is created if missing.
        specs: Names, shapes and dtypes of all tensors that `values` yields, in any order.
        owner: Identifier of the source from which the tensors were made, which must match that of existing tensors.
            With "", the values of existing tensors are compared with the new values instead.
        values: Function that returns an iterable of (name, tensor) pairs, with the dtypes of `specs`.

    Raises:
        ConfigError: If the folder contains another model's weights, or is a file.
        CheckpointError: If the file could not be written, or the existing file is damaged.
    """
    folder = Path(expand_home(folder))
    if folder.is_file():
        raise ConfigError(f"the offload folder {folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if path.exists():
        found = open_checkpoint(path)
        _check_names(path, found, specs)
        if owner and map_safetensors(path)[1].get(_OWNER) != owner:
            raise _make_foreign_error(path, "they were made from other files")
        for name, value in () if owner else values():
            if not torch.equal(get_raw_bytes(found.tensors[name].tensor()), get_raw_bytes(value)):
                raise _make_foreign_error(path, f"the values of {name} differ")
        return found
    try:
        with open_replacement(path, has_other_writers=True) as staged:
            write_file(staged, order_widest_first(specs), values(), {_OWNER: owner})
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    return open_checkpoint(path)


def find_existing(folder: str | Path | None, specs: Mapping[str, TensorSpec]) -> WeightFiles | None:
    """Return the tensors that an earlier run has written to the offload folder, or None if there are none.

    Args:
        folder: Offload folder, or None.
        specs: Expected shape and dtype of each tensor, by name.

    Raises:
        ConfigError: If the folder contains the weights of a model with other names, shapes or dtypes.
        CheckpointError: If the file is damaged.
    """
    if folder is None or not (path := Path(expand_home(folder)) / FILE).exists():
        return None
    found = open_checkpoint(path)
    _check_names(path, found, specs)
    return found


def _check_names(path: Path, files: WeightFiles, specs: Mapping[str, TensorSpec]) -> None:
    """Raise an error if the tensors in an offload folder differ from those of the model.

    Args:
        path: Offload folder.
        files: Weight files of the folder.
        specs: Shape and dtype of each of the model's tensors, by name.

    Raises:
        ConfigError: If a name, a shape or a dtype differs, so that the folder belongs to another model.
    """
    stored_specs = {name: TensorSpec(stored.shape, stored.dtype) for name, stored in files.tensors.items()}
    differing = sorted(name for name in {*stored_specs, *specs} if stored_specs.get(name) != specs.get(name))
    if differing:
        name = differing[0]
        raise _make_foreign_error(
            path, f"{name} is {stored_specs.get(name, 'not there')}, wanted: {specs.get(name, 'nothing')}"
        )


def _make_foreign_error(path: Path, reason: str) -> ConfigError:
    """Return the error for a file that contains the weights of another model."""
    return ConfigError(
        f"{path} contains the weights of another model ({reason}); give an empty offload folder, or remove the file"
    )


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | Path, index: dict[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]] | None:
    """Write one tensor to `<offload_folder>/<weight_name>.dat`. The file appears only when it is complete.

    Args:
        weight: Strided tensor with values, on any device.
        weight_name: Name of the tensor in the model, such as "layers.0.weight".
        offload_folder: Existing folder to write to. An existing file of this name is replaced.
        index: Index to add the tensor's entry to, for `save_offload_index`. None (the default): no index.

    Returns:
        The `index` argument, which now has the new entry, or None if `index` is None.

    Raises:
        ConfigError: If the tensor has no values, or its name cannot be a file name.
    """
    path = _check_weight(weight, weight_name, offload_folder)
    plain = weight.detach().cpu().contiguous()
    with open_replacement(path, has_other_writers=True) as staged, staged.open("wb") as file:
        if plain.numel():
            file.write(plain.flatten().view(torch.uint8).numpy().data)
    if index is not None:
        index[weight_name] = {"dtype": get_dtype_name(weight.dtype), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Map the tensor in a `.dat` file into memory, and return it.

    Data is read at its first use. Changes to the tensor never reach the file.

    Args:
        weight_file: Path of the `.dat` file.
        weight_info: Entry of the file in the index, with `dtype` and `shape`, such as {"dtype": "float32", "shape":
            [2, 3]}.

    Returns:
        A CPU tensor.

    Raises:
        CheckpointError: If the file is missing, its size does not match its entry, or the entry has no valid dtype and
            shape. A tensor without elements needs no file.
    """
    path, (dtype, shape) = Path(weight_file), _parse_entry(str(weight_file), weight_info)
    num_bytes = math.prod(shape) * dtype.itemsize
    size = path.stat().st_size if path.is_file() else None
    # numpy cannot map an empty tensor, so programs that write this format with numpy leave no file or an empty file.
    if num_bytes == 0 and not size:
        return torch.empty(shape, dtype=dtype)
    if size != num_bytes:
        state = "missing" if size is None else f"{size} bytes"
        raise CheckpointError(
            f"{escape_text(path)} is {state}; its entry has {shorten_repr(list(shape))} {dtype}, {num_bytes} bytes; offload again"
        )
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(shape)


def _parse_entry(name: str, info: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor from its entry in Accelerate's offload index.

    Raises:
        CheckpointError: If the dtype or the shape is missing or invalid, or the tensor is absurdly large.
    """
    dtype = getattr(torch, str(info.get("dtype")), None)
    shape = info.get("shape")
    is_shape = isinstance(shape, list | tuple) and all(type(n) is int and 0 <= n < _MOST for n in shape)
    if not isinstance(dtype, torch.dtype) or not is_shape or math.prod(max(n, 1) for n in shape or ()) >= _MOST:
        raise CheckpointError(
            f"{escape_text(name)}: the entry in the offload index is {shorten_repr(dict(info))}; "
            "it needs a dtype of torch and a shape"
        )
    assert shape is not None
    return dtype, tuple(shape)


def _make_path(folder: str | Path, name: str) -> Path:
    """Return the path of the file for a tensor.

    Raises:
        ConfigError: If the tensor's name cannot be a file name.
    """
    if Path(name).name != name or "\0" in name:
        raise ConfigError(f"{name!r} is not a name of a tensor that can be a file in {folder}")
    return Path(folder) / f"{name}.dat"


def _check_weight(weight: torch.Tensor, name: str, folder: str | Path) -> Path:
    """Return the path of a tensor's file.

    Raises:
        ConfigError: If the tensor has no values, or its name cannot be a file name.
    """
    path = _make_path(folder, name)
    if weight.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values to offload; load it first")
    return path


def read_offload_index(offload_folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the entries in the `index.json` of an offload folder, by tensor name.

    An entry has the keys `dtype` and `shape`. It is the form that `dispatch_model(offload_index=...)` accepts.

    Args:
        offload_folder: Folder that `offload_state_dict` has written.

    Raises:
        CheckpointError: If the file is missing or is not an index.
    """
    path = Path(expand_home(offload_folder)) / INDEX
    try:
        index = parse_json(read_regular_file(path, MAX_HEADER))
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read as an offload index ({error})") from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise CheckpointError(f"{path} is not an offload index: it gives no entry for each name")
    return index


def save_offload_index(index: Mapping[str, Mapping[str, object]] | None, offload_folder: str | Path) -> None:
    """Add entries to the folder's `index.json` in one atomic write. If there are no entries, write nothing.

    Args:
        index: Entries by tensor name, or None.
        offload_folder: Folder with the tensors' files.

    Raises:
        CheckpointError: If the existing index is damaged.
    """
    if not index:
        return
    path = Path(expand_home(offload_folder)) / INDEX
    present = read_offload_index(offload_folder) if path.exists() else {}
    write_text(path, json.dumps({**present, **index}, indent=2), has_other_writers=True)


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict to an offload folder, and add them to the folder's index.

    Several calls can fill a folder with parts of one model. Each tensor becomes a file `<name>.dat`. Only one process may
    write to a folder at a time.

    Args:
        save_dir: Folder to write to. It is created if missing.
        state_dict: Tensors with values, by name, on any device.

    Raises:
        ConfigError: If the folder already has a tensor of the same name with another shape or dtype, a name cannot be a
            file name, or a tensor is on the meta device. Nothing is written then.
        CheckpointError: If the existing index is damaged.

    Example::

        offload_state_dict("offload", model.state_dict())
        index = read_offload_index("offload")
    """
    folder = Path(expand_home(save_dir))
    folder.mkdir(parents=True, exist_ok=True)
    present = read_offload_index(folder) if (folder / INDEX).exists() else {}
    for name, tensor in state_dict.items():
        _check_weight(tensor, name, folder)
        wanted = (tensor.dtype, tuple(tensor.shape))
        if name in present and "safetensors_file" not in present[name] and _parse_entry(name, present[name]) != wanted:
            raise ConfigError(
                f"{folder} already contains another {name}: {present[name]}, not {list(tensor.shape)} {tensor.dtype}; give an "
                "empty folder"
            )
    index: dict[str, dict[str, Any]] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, folder, index)
    save_offload_index(index, folder)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Read-only mapping from names to the tensors of a state dict and of an offload folder.

    Tensors in the folder are read when their name is looked up.

    Args:
        state_dict: Tensors in memory. They take precedence over those in the folder. None (the default): none.
        save_folder: Folder that offload_state_dict() has written. None (the default): no folder.
        index: Entries of tensors in the folder or in safetensors files. None (the default): the folder's own index.
        device: Device to which tensors of safetensors files are moved. None (the default): the tensors are mapped from
            the files, on the CPU.

    Attributes:
        all_keys: Names of all tensors: those of `state_dict`, then those of the index.

    Raises:
        ConfigError: If `state_dict`, `save_folder` and `index` are all None.
        CheckpointError: If the folder's own index is needed, and is missing or damaged.
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
        """Return the tensor with this name, from the state dict or mapped from its file.

        Raises:
            KeyError: If the name is unknown.
            CheckpointError: If the tensor's file is missing or does not match its entry.
            ConfigError: If the tensor is in a `.dat` file, but no `save_folder` was given.
        """
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            return self._load_from_safetensors(key, info)
        if self.save_folder is None:
            raise ConfigError(f"{key} is in a .dat file, and no save_folder was given")
        return load_offloaded_weight(_make_path(self.save_folder, key), info)

    def is_mapped(self, key: str, dtype: torch.dtype) -> bool:
        """Whether a tensor can be used directly from a mapped file, without a conversion to `dtype`.

        False for tensors of the state dict, and for all tensors if the loader has a `device`.
        """
        if key in self.state_dict or self.device is not None:
            return False
        info = self.index[key]
        if info.get("safetensors_file") is None:
            return info.get("dtype") == get_dtype_name(dtype)
        stored = self._get_stored(key, info)
        return stored.is_mapped and stored.dtype == dtype

    def _load_from_safetensors(self, key: str, info: Mapping[str, object]) -> torch.Tensor:
        """Return a tensor from the safetensors file that its entry names, in the entry's dtype and on `device`."""
        tensor = self._get_stored(key, info).tensor()
        if "dtype" in info:
            tensor = tensor.to(_parse_entry(key, {"dtype": info["dtype"], "shape": []})[0])
        return tensor if self.device is None else tensor.to(self.device)

    def _get_stored(self, key: str, info: Mapping[str, object]) -> StoredTensor:
        """Return the stored tensor for an entry of the index that names a safetensors file. Files are opened once.

        Raises:
            CheckpointError: If the file does not exist, or does not contain the tensor.
        """
        file, name = str(info["safetensors_file"]), str(info.get("weight_name", key))
        if not Path(file).is_file():
            raise CheckpointError(
                f"{escape_text(file)}, which the offload index names for {escape_text(key)}, is no file"
            )
        if file not in self._files:
            self._files[file] = open_checkpoint(file)
        stored = self._files[file].tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{file} contains no tensor {name!r}, which the offload index names for {key}")
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, Value]):
    """View of a mapping that has only the entries whose names start with a prefix, without that prefix.

    Args:
        dataset: Mapping to read from, such as an `OffloadedWeightsLoader`.
        prefix: Prefix that is added to a name before the name is looked up in `dataset`, such as "layers.0.".
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
    """Set a model's tensors to the values in an offload folder, mapped from their files.

    Tied tensors are loaded once. The tensors are on the CPU. Their pages are read from the files at first use.

    Args:
        model: Model on the meta device, or with values, which are then replaced.
        index: Entries to load, by tensor name, as from `read_offload_index`. With None or an empty index, nothing is
            loaded.
        offload_folder: Folder that contains the `.dat` files. None: all entries refer to safetensors files.

    Raises:
        CheckpointError: If a file is missing or truncated, or names, shapes or dtypes do not match the model. The model
            is then unchanged.
        ConfigError: If an entry refers to a `.dat` file, but `offload_folder` is None. The model is then unchanged.
    """
    if not index:
        return
    places = map_locations(model)
    wrong = [name for name in index if name not in places]
    if wrong:
        raise CheckpointError(f"{type(model).__name__} has no {', '.join(wrong[:5])}; the folder is another model's")
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    values = {name: fit_value(name, places[name].tensor, weights[name]) for name in index}
    groups = map_ties(places)
    for name, value in values.items():
        assign_value(places, groups[name], value, is_mapped=weights.is_mapped(name, value.dtype))


def fit_value(name: str, wanted: torch.Tensor, value: torch.Tensor, source: str = "the offload folder") -> torch.Tensor:
    """Return a value in the dtype of the model's tensor.

    A value is converted only from one floating dtype to another.

    Args:
        name: Name of the tensor, for messages.
        wanted: Tensor of the model.
        value: Value to assign to the tensor.
        source: Text that names where the value comes from, for messages. Default: the offload folder.

    Raises:
        CheckpointError: If the shapes differ, or if the dtypes differ and are not both floating.
    """
    is_near = value.is_floating_point() and wanted.is_floating_point()
    if wanted.shape != value.shape or not (wanted.dtype == value.dtype or is_near):
        raise CheckpointError(
            f"{name} is {list(value.shape)} {value.dtype} in {source} and {list(wanted.shape)} {wanted.dtype} in the model; "
            "give the weights of this model"
        )
    return value.to(wanted.dtype)


def extract_submodules_state_dict(state_dict: Mapping[str, Value], submodule_names: Iterable[str]) -> dict[str, Value]:
    """Return the entries of the given modules and all of their submodules, in the order of the state dict.

    Values are not copied. Names are not shortened. A name without entries is ignored.

    Args:
        state_dict: Values by dotted name.
        submodule_names: Dotted names of modules or tensors, such as "layers.0".
    """
    wanted = set(submodule_names)

    def is_inside(name: str) -> bool:
        while name:
            if name in wanted:
                return True
            name = name.rpartition(".")[0]
        return False

    return {name: value for name, value in state_dict.items() if is_inside(name)}
