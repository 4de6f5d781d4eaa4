"""Load the weights of a checkpoint into a model: into its tensors, or as references to files for tensors on disk.

Weights are mapped from their files. They are converted or copied only if necessary. Names, shapes and files are checked
before the first value is loaded.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.core.weights.files import StoredTensor, WeightFiles, open_checkpoint
from headway.core.weights.layer_data import get_weight_name, load_layer_data
from headway.core.weights.locations import TensorLocation, assign_value, map_locations, map_ties
from headway.core.weights.names import TensorSources, load_extra_states, match_names
from headway.core.weights.tensor_bytes import TensorSpec
from headway.core.weights.transformers_names import Conversion
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.offload_folder import offload_tensors
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.budget import Device
from headway.offload.placement.sizes import Dtype, parse_dtype
from headway.offload.placement.storage_devices import (
    CPU,
    DISK,
    StorageDevice,
    is_offloaded,
    make_placement,
)

logger = get_logger(__name__)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | Path | None = None,
    dtype: Dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, on the meta device or with values.

    On the CPU, weights are mapped from their files. A memory page is read at its first use. Changes, such as those of
    training, stay in memory and never reach the file. If the model needs another dtype or layout than the file has,
    tensors are converted one at a time. All names, shapes and files are checked before the first value is loaded.

    No hooks are attached; `load_checkpoint_and_dispatch` also makes a model with several devices run. To train a sharded
    model, use `Accelerator.load_weights`. No Accelerator is needed, and no rank waits.

    Args:
        model: Any module. A model on the meta device gets new parameters. Other models keep theirs, with new values.
        checkpoint: File, index, folder, or model ID on the Hugging Face Hub. Safetensors are preferred to `.bin` files.
            A `.bin` file is read without executing any of its content.
        device_map: Device by module name, as returned by infer_auto_device_map. The key "" is the whole model, and
            "disk" leaves weights in their files. None (the default) leaves tensors on their devices, and loads tensors
            on the meta device to the CPU.
        offload_folder: Folder for tensors on "disk" that cannot be used from their own file: converted tensors and old
            `.bin` files. It is created if missing. None (the default): no folder.
        dtype: Dtype in which floating weights are loaded, such as torch.bfloat16 or "bfloat16". None (the default): the
            model's dtype.
        offload_state_dict: No effect, because the whole state dict is never in memory. Accepted for compatibility with
            Accelerate.
        offload_buffers: Whether the buffers of modules on "disk" are left on disk, too. Default: False.
        keep_in_fp32_modules: Components of dotted names, such as "lm_head". Weights whose names contain one are loaded
            as float32 regardless of `dtype`. None (the default): no such weights.
        offload_8bit_bnb: Not supported.
        strict: Whether to raise CheckpointError if the checkpoint has names that the model lacks, or lacks persistent
            buffers of the model. Default: False.
        full_state_dict: Whether the checkpoint has full tensors. False is not supported. Default: True.
        broadcast_from_rank0: No effect, because all ranks on a machine share the pages of the mapped files.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or does not fit the model. The model is then
            unchanged.
        ConfigError: If the device map does not match the model, or `dtype` is not a dtype of torch. Also if an offload
            folder is needed and not given, or belongs to another model.
        UnsupportedError: If `offload_8bit_bnb=True` or `full_state_dict=False` is given.
    """
    check_checkpoint_kind(full_state_dict, offload_8bit_bnb)
    storage_devices = None
    if device_map is not None:
        storage_devices = make_placement(
            model, resolve_device_map(model, device_map), CPU, offload_buffers
        ).storage_devices
    load_weights(model, checkpoint, storage_devices, offload_folder, dtype, keep_in_fp32_modules or (), strict)


def check_checkpoint_kind(full_state_dict: bool, is_quantized: bool = False) -> None:
    """Raise UnsupportedError unless the checkpoint has full, unquantized tensors.

    Args:
        full_state_dict: Whether the checkpoint has full tensors. False: it has shards.
        is_quantized: Whether the checkpoint has the tensors of bitsandbytes' 8-bit layers. Default: False.
    """
    if is_quantized or not full_state_dict:
        raise UnsupportedError(
            "load_checkpoint_in_model() loads full, unquantized tensors; leave offload_8bit_bnb=False, full_state_dict=True"
        )


def load_weights(
    model: nn.Module,
    checkpoint: str | Path,
    storage_devices: Mapping[str, StorageDevice] | None,
    offload_folder: str | Path | None,
    dtype: Dtype | None,
    fp32_modules: Iterable[str],
    strict: bool,
) -> None:
    """Load a checkpoint, and move each tensor to its target device or leave it on disk.

    Args:
        model, checkpoint, offload_folder, dtype, strict: See load_checkpoint_in_model().
        storage_devices: Target of each tensor by name: a device, or "disk". None leaves tensors on their devices, and loads
            tensors on the meta device to the CPU.
        fp32_modules: Components of dotted names, such as "lm_head". Weights whose names contain one are loaded as
            float32.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or does not fit the model.
        ConfigError: If `dtype` is not a dtype of torch, or an offload folder is needed and not given, or belongs to
            another model.
    """
    opened = open_checkpoint(checkpoint)
    places = map_locations(model)
    sources = match_names(model, places, opened, strict)
    target = parse_dtype(dtype)
    if target is not None and not isinstance(target, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} has no dtype in torch to load into; it is for estimates only")
    if storage_devices is None:
        storage_devices = {name: CPU if place.tensor.is_meta else place.tensor.device for name, place in places.items()}
    _WeightLoading(
        checkpoint=opened,
        sources=sources,
        places=places,
        storage_devices=storage_devices,
        dtype=target,
        fp32_modules=frozenset(fp32_modules),
        folder=offload_folder,
    ).load_values()
    load_layer_data(places, sources.layer_data, opened.tensors)
    load_extra_states(model, sources, opened)


class _LoadedValue(NamedTuple):
    """Value that is loaded into a tensor of the model.

    Attributes:
        name: Name of the tensor in the model.
        value: Value with the tensor's device and dtype.
        is_mapped: Whether the value is mapped from a file.
    """

    name: str
    value: torch.Tensor
    is_mapped: bool


@dataclass
class _WeightLoading:
    """Operation that loads a checkpoint's tensors into a model.

    Attributes:
        checkpoint: Open files of the checkpoint.
        sources: Mapping from the model's tensors to the stored tensors from which they are loaded.
        places: Modules and attributes that hold each tensor of the model, by name.
        storage_devices: Target of each tensor by name: a device, or "disk".
        dtype: Dtype in which floating weights are loaded, or None for the model's dtype.
        fp32_modules: Components of dotted names. Weights whose names contain one are loaded as float32.
        folder: Offload folder, or None.
    """

    checkpoint: WeightFiles
    sources: TensorSources
    places: dict[str, TensorLocation]
    storage_devices: Mapping[str, StorageDevice]
    dtype: torch.dtype | None
    fp32_modules: frozenset[str]
    folder: str | Path | None

    def load_values(self) -> None:
        """Load the value of every tensor of the model, and assign it to the tensor."""
        groups = map_ties(self.places)
        offloaded = self._write_offloaded()
        num_mapped = 0
        quantized = {get_weight_name(name) for name in self.sources.layer_data}
        for name, value, is_in_file in self._iterate_values(offloaded):
            if name in quantized and not self.places[name].tensor.is_meta:
                # A quantized layer of bitsandbytes keeps further references to the memory of its weight.
                with torch.no_grad():
                    self.places[name].tensor.copy_(value)
                continue
            assign_value(self.places, groups[name], value, is_in_file)
            num_mapped += value.nbytes if is_in_file else 0
        total = sum(stored.num_bytes for stored in self.checkpoint.tensors.values())
        logger.info(
            "%s: %d tensors, %s, of which %s are used from the file",
            self.checkpoint.source,
            len(self.sources.specs),
            format_bytes(total),
            format_bytes(num_mapped),
        )

    def _choose_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is loaded.

        Tensors that are not floating in the file, and tensors with less than 16 bits in the model, keep the model's
        dtype.
        """
        own, stored = self.places[name].tensor.dtype, self.sources.specs[name].dtype
        if not stored.is_floating_point or own.itemsize < 2:
            return own
        if not self.fp32_modules.isdisjoint(name.split(".")):
            return torch.float32
        return own if self.dtype is None else self.dtype

    def _iterate_values(self, offloaded: Mapping[str, StoredTensor]) -> Iterator[_LoadedValue]:
        """Yield the value of each tensor. Besides the tensors already in the model, one tensor at a time is in memory.

        Args:
            offloaded: Tensors that have been written to the offload folder, by name.
        """
        groups = map_ties(self.places)
        # First tensor of the tied group that uses the memory at each address.
        leader_by_address: dict[int, str] = {}
        for name, key in self.sources.direct.items():
            if name in offloaded:
                yield _LoadedValue(name, offloaded[name].tensor(), is_mapped=True)
                continue
            stored, dtype, device = self.checkpoint.tensors[key], self._choose_dtype(name), self.storage_devices[name]
            value = stored.tensor()
            leader = groups[name][0]
            if value.numel() and leader_by_address.setdefault(value.data_ptr(), leader) != leader:
                # The file has one tensor for several tensors that are not tied in this model. Each gets its own memory.
                value = open_checkpoint(stored.file).tensors[key].tensor() if stored.is_mapped else value.clone()
            if not is_offloaded(device):
                value = value.to(device)
            is_mapped_value = stored.is_mapped and value.device.type == "cpu" and dtype == value.dtype
            yield _LoadedValue(name, value.to(dtype), is_mapped_value)
        for conversion in self.sources.conversions:
            if conversion.target in offloaded:
                converted_names = self._list_converted_names(conversion)
                for name, stored in offloaded.items():
                    if name in converted_names:
                        yield _LoadedValue(name, stored.tensor(), is_mapped=True)
                continue
            for name, value in conversion.run(self._read_tensor).items():
                device = CPU if self.storage_devices[name] == DISK else self.storage_devices[name]
                yield _LoadedValue(name, value.to(device).to(self._choose_dtype(name)), is_mapped=False)

    def _read_tensor(self, key: str) -> torch.Tensor:
        """Return the tensor with this name in the checkpoint."""
        return self.checkpoint.tensors[key].tensor()

    def _list_converted_names(self, conversion: Conversion) -> set[str]:
        """Return the names of the model's tensors that a conversion makes, without reading any value."""
        return set(conversion.run(lambda key: self._read_tensor(key).to("meta")))

    def _can_use_file(self, name: str, key: str) -> bool:
        """Whether a tensor can be used from the checkpoint's own file: it is mapped and has the dtype of the model.

        Args:
            name: Name of the tensor in the model.
            key: Name of the tensor in the checkpoint.
        """
        stored_dtype = self.sources.specs[name].dtype
        return self.checkpoint.tensors[key].is_mapped and self._choose_dtype(name) == stored_dtype

    def _write_offloaded(self) -> dict[str, StoredTensor]:
        """Write tensors whose target is the disk to the offload folder, unless their own file can be used directly.

        Returns:
            The written tensors, by name.

        Raises:
            ConfigError: If tensors must be written, but no offload folder was given.
        """
        on_disk = {name: key for name, key in self.sources.direct.items() if self.storage_devices[name] == DISK}
        direct = {name: key for name, key in on_disk.items() if not self._can_use_file(name, key)}
        conversions = [each for each in self.sources.conversions if self.storage_devices[each.target] == DISK]
        names = list(direct)
        for conversion in conversions:
            names += self._list_converted_names(conversion)
        if not names:
            return {}
        if self.folder is None:
            raise ConfigError(
                f"{len(names)} tensors placed on disk cannot be used from their files as they are (converted in dtype or "
                f"layout, or in an old format): {', '.join(names[:5])}; give offload_folder=, or load with the files' dtype"
            )

        def iterate_values() -> Iterator[tuple[str, torch.Tensor]]:
            for name, key in direct.items():
                yield name, self._read_tensor(key).to(self._choose_dtype(name))
            for conversion in conversions:
                for name, value in conversion.run(self._read_tensor).items():
                    yield name, value.to(self._choose_dtype(name))

        specs = {name: TensorSpec(self.sources.specs[name].shape, self._choose_dtype(name)) for name in names}
        return offload_tensors(self.folder, specs, _make_identity(self.checkpoint), iterate_values).tensors


def _make_identity(checkpoint: WeightFiles) -> str:
    """Return a hash of a checkpoint's file names, sizes and modification times.

    The offload folder stores it to identify the source of its tensors.
    """
    descriptions = []
    for file in checkpoint.files:
        stat = file.stat()
        descriptions.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(descriptions).encode()).hexdigest()
