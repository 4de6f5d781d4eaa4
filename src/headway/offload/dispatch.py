"""Dispatch models: place their parts on devices, in host memory and on disk, load their weights, and run them in place.

Weights are mapped from their files. They are converted or copied only if necessary. Names, shapes and files are checked
before the first value is loaded.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.core.weights.files import StoredTensor, WeightFiles, open_checkpoint
from headway.core.weights.names import (
    Conversion,
    TensorLocation,
    TensorSources,
    assign_value,
    is_mapped,
    load_extra_states,
    map_locations,
    map_ties,
    match_names,
)
from headway.core.weights.shards import TensorSpec
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.execution import Execution, undispatch_model
from headway.offload.offload_folder import OffloadedWeightsLoader, find_existing, fit_value, offload_tensors
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.budget import Device, check_presence
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.homes import (
    CPU,
    DISK,
    Home,
    Placement,
    is_offloaded,
    make_placement,
    resolve_compute_device,
)
from headway.offload.placement.sizes import Dtype, parse_dtype

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

    Args:
        model: Any module. A model on the meta device gets new parameters. Other models keep theirs, with new values.
        checkpoint: File, index, folder, or model ID on the Hugging Face Hub. Safetensors are preferred to `.bin` files.
            A `.bin` file is read without executing any of its content.
        device_map: Device by module name, as returned by infer_auto_device_map. The key "" is the whole model, and
            "disk" leaves weights in their files. None leaves tensors on their devices, and loads tensors on the meta
            device to the CPU.
        offload_folder: Folder for tensors on "disk" that cannot be used from their own file: converted tensors and old
            `.bin` files.
        dtype: Dtype in which floating weights are loaded, or None for the model's dtype.
        offload_state_dict: No effect, because the whole state dict is never in memory. Accepted for compatibility with
            Accelerate.
        offload_buffers: Whether the buffers of modules on "disk" are left on disk, too.
        keep_in_fp32_modules: Components of dotted names, such as "lm_head". Weights whose names contain one are loaded
            as float32 regardless of `dtype`.
        offload_8bit_bnb: Not supported.
        strict: Whether to raise CheckpointError if the checkpoint has names that the model lacks, or lacks persistent
            buffers of the model.
        full_state_dict: Whether the checkpoint has full tensors. False is not supported.
        broadcast_from_rank0: No effect, because all ranks on a machine share the pages of the mapped files.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or does not fit the model. The model is then
            unchanged.
        ConfigError: If the device map does not match the model, or `dtype` is not a dtype of torch. Also if an offload
            folder is needed and not given, or belongs to another model.
        UnsupportedError: If `offload_8bit_bnb=True` or `full_state_dict=False` is given.
    """
    check_checkpoint_kind(full_state_dict, offload_8bit_bnb)
    homes = None
    if device_map is not None:
        homes = make_placement(model, resolve_device_map(model, device_map), CPU, offload_buffers).homes
    load_weights(model, checkpoint, homes, offload_folder, dtype, keep_in_fp32_modules or (), strict)


def check_checkpoint_kind(full_state_dict: bool, is_quantized: bool = False) -> None:
    """Raise UnsupportedError unless the checkpoint has full, unquantized tensors.

    Args:
        full_state_dict: Whether the checkpoint has full tensors. False: it has shards.
        is_quantized: Whether the checkpoint has the tensors of bitsandbytes' 8-bit layers.
    """
    if is_quantized or not full_state_dict:
        raise UnsupportedError(
            "load_checkpoint_in_model() loads full, unquantized tensors; leave offload_8bit_bnb=False, full_state_dict=True"
        )


def load_weights(
    model: nn.Module,
    checkpoint: str | Path,
    homes: Mapping[str, Home] | None,
    offload_folder: str | Path | None,
    dtype: Dtype | None,
    fp32_modules: Iterable[str],
    strict: bool,
) -> None:
    """Load a checkpoint, and move each tensor to its target device or leave it on disk.

    Args:
        model, checkpoint, offload_folder, dtype, strict: See load_checkpoint_in_model().
        homes: Target of each tensor by name: a device, or "disk". None leaves tensors on their devices, and loads
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
    if homes is None:
        homes = {name: CPU if place.tensor.is_meta else place.tensor.device for name, place in places.items()}
    _WeightLoading(
        checkpoint=opened,
        sources=sources,
        places=places,
        homes=homes,
        dtype=target,
        fp32_modules=frozenset(fp32_modules),
        folder=offload_folder,
    ).load_values()
    load_extra_states(model, sources, opened)


@dataclass
class _WeightLoading:
    """Operation that loads a checkpoint's tensors into a model.

    Attributes:
        checkpoint: Open files of the checkpoint.
        sources: Mapping from the model's tensors to the stored tensors from which they are loaded.
        places: Modules and attributes that hold each tensor of the model, by name.
        homes: Target of each tensor by name: a device, or "disk".
        dtype: Dtype in which floating weights are loaded, or None for the model's dtype.
        fp32_modules: Components of dotted names. Weights whose names contain one are loaded as float32.
        folder: Offload folder, or None.
    """

    checkpoint: WeightFiles
    sources: TensorSources
    places: dict[str, TensorLocation]
    homes: Mapping[str, Home]
    dtype: torch.dtype | None
    fp32_modules: frozenset[str]
    folder: str | Path | None

    def load_values(self) -> None:
        """Load the value of every tensor of the model, and assign it to the tensor."""
        groups = map_ties(self.places)
        offloaded = self._write_offloaded()
        num_mapped = 0
        for name, value, is_in_file in self._iterate_values(offloaded):
            assign_value(self.places, groups[name], value, is_in_file)
            num_mapped += value.nbytes if is_in_file else 0
        total = sum(stored.num_bytes for stored in self.checkpoint.tensors.values())
        logger.info(
            "%s: %d tensors, %s, of which %s are used from the file",
            self.checkpoint.source,
            len(self.sources.shapes),
            format_bytes(total),
            format_bytes(num_mapped),
        )

    def _choose_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is loaded.

        Tensors that are not floating in the file, and tensors with less than 16 bits in the model, keep the model's
        dtype.
        """
        own, stored = self.places[name].tensor.dtype, self.sources.shapes[name][1]
        if not stored.is_floating_point or own.itemsize < 2:
            return own
        if not self.fp32_modules.isdisjoint(name.split(".")):
            return torch.float32
        return own if self.dtype is None else self.dtype

    def _iterate_values(self, offloaded: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield each tensor's name and value, and whether the value is mapped from a file.

        In addition to the tensors that are already in the model, only one tensor at a time is in memory.

        Args:
            offloaded: Tensors that have been written to the offload folder, by name.
        """
        groups = map_ties(self.places)
        # First tensor of the tied group that uses the memory at each address.
        leader_by_address: dict[int, str] = {}
        for name, key in self.sources.direct.items():
            if name in offloaded:
                yield name, offloaded[name].tensor(), True
                continue
            stored, dtype, home = self.checkpoint.tensors[key], self._choose_dtype(name), self.homes[name]
            value, leader = stored.tensor(), groups[name][0]
            if value.numel() and leader_by_address.setdefault(value.data_ptr(), leader) != leader:
                # The file has one tensor for several tensors that are not tied in this model. Each gets its own memory.
                value = open_checkpoint(stored.file).tensors[key].tensor() if stored.is_mapped else value.clone()
            if not is_offloaded(home):
                value = value.to(home)
            is_in_file = stored.is_mapped and value.device.type == "cpu" and dtype == value.dtype
            yield name, value.to(dtype), is_in_file
        for conversion in self.sources.conversions:
            if conversion.target in offloaded:
                names = self._list_converted_names(conversion)
                yield from ((name, offloaded[name].tensor(), True) for name in offloaded if name in names)
                continue
            for name, value in conversion.run(self._read_tensor).items():
                home = CPU if self.homes[name] == DISK else self.homes[name]
                yield name, value.to(home).to(self._choose_dtype(name)), False

    def _read_tensor(self, key: str) -> torch.Tensor:
        """Return the tensor with this name in the checkpoint."""
        return self.checkpoint.tensors[key].tensor()

    def _list_converted_names(self, conversion: Conversion) -> set[str]:
        """Return the names of the model's tensors that a conversion makes, without reading any value."""
        return set(conversion.run(lambda key: self._read_tensor(key).to("meta")))

    def _write_offloaded(self) -> dict[str, StoredTensor]:
        """Write tensors whose target is the disk to the offload folder, unless their own file can be used directly.

        Returns:
            The written tensors, by name.

        Raises:
            ConfigError: If tensors must be written, but no offload folder was given.
        """
        direct = {}
        for name, key in self.sources.direct.items():
            is_usable = (
                self.checkpoint.tensors[key].is_mapped and self._choose_dtype(name) == self.sources.shapes[name][1]
            )
            if self.homes[name] == DISK and not is_usable:
                direct[name] = key
        conversions = [each for each in self.sources.conversions if self.homes[each.target] == DISK]
        names = [*direct, *(name for each in conversions for name in self._list_converted_names(each))]
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

        specs = {name: TensorSpec(self.sources.shapes[name][0], self._choose_dtype(name)) for name in names}
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


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | str | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, place its parts on devices, and return the model.

    See load_checkpoint_in_model() and dispatch_model() for the arguments that are not listed.

    Args:
        model: Module, usually built under init_empty_weights().
        checkpoint: File, index, folder, or model ID on the Hugging Face Hub.
        device_map: "auto", "balanced", "balanced_low_0", "sequential", one device for the whole model, or devices by
            module name. None loads the checkpoint without placing the parts on devices.
        max_memory: Memory limit of each device, in bytes or as text such as "10GiB". Used if `device_map` is "auto",
            "balanced", "balanced_low_0" or "sequential".
        no_split_module_classes: Classes whose modules are not split over devices, or None for the classes that the
            model declares.
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or does not fit the model. The model is then
            unchanged.
        DeviceMapError: If the device map or `max_memory` does not match the model or the machine's devices.
        ConfigError: If `dtype` is not a dtype of torch, or an offload folder is needed and not given, or belongs to
            another model.
        UnsupportedError: If `full_state_dict=False` is given.
    """
    check_checkpoint_kind(full_state_dict)
    placement = None
    if device_map is not None:
        check_presence(max_memory)
        resolved = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
        placement = make_placement(model, resolved, None, offload_buffers)
    homes = None if placement is None else placement.homes
    load_weights(model, checkpoint, homes, offload_folder, dtype, (), strict)
    if placement is not None:
        undispatch_model(model)
        _attach_execution(model, placement, offload_folder, skip_keys, preload_module_classes, force_hooks)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device],
    main_device: Device | torch.device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, object]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model's parts on devices, and attach hooks that run each part.

    Return the model, with the device map as its attribute `hf_device_map`. Parts on an accelerator run on that
    accelerator. Parts on "cpu" and "disk" run on the main device. If the main device is an accelerator, the weights of
    these parts are copied ahead of use. If it is the CPU, their weights are used in place, and those on disk are read
    ahead. Outside of a forward, every weight has its real values, so the state dict equals that of the original model.
    A dispatched model can be dispatched again.

    Args:
        model: Model to place.
        device_map: "auto", "balanced", "balanced_low_0", "sequential", one device for the whole model, or devices by
            module name.
        main_device: Device that runs offloaded parts. None for the first accelerator in the map, else the CPU.
        state_dict: Values for parts on the meta device.
        offload_dir: Folder for weights that are placed on "disk" and are not in a mapped file yet.
        offload_index: Entries that locate values in files, by tensor name. An entry is either {"safetensors_file":
            path, "weight_name": name in that file}, or {"dtype": ..., "shape": ...} for `<name>.dat` in the offload
            folder, as returned by read_offload_index().
        offload_buffers: Whether buffers are offloaded, too. If False, they stay on the main device, because they are
            small.
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules. torch's MultiheadAttention and
            TransformerEncoderLayer are always included.
        force_hooks: Whether hooks are attached even if everything is on one device.

    Raises:
        DeviceMapError: If the device map does not match the model or the machine's devices.
        ConfigError: If a tensor has no values, or an offload folder is needed and not given, or belongs to another
            model.
        CheckpointError: If a file of `offload_index` is missing, or a value from it or from `state_dict` does not match
            the model.
    """
    placement = make_placement(model, resolve_device_map(model, device_map), main_device, offload_buffers)
    undispatch_model(model)
    _fill_meta_tensors(map_locations(model), state_dict, offload_index, offload_dir)
    _attach_execution(model, placement, offload_dir, skip_keys, preload_module_classes, force_hooks)
    return model


def _attach_execution(
    model: nn.Module,
    placement: Placement,
    folder: str | Path | None,
    skip_keys: str | list[str] | None,
    preload: list[str] | None,
    force_hooks: bool,
) -> None:
    """Move every tensor to its target device or file, and attach the hooks that run the model with this placement.

    If the whole model is on one accelerator, or on the CPU and runs there, hooks are attached only if `force_hooks` is
    True. The model gets the attribute `hf_device_map` in any case.

    Args:
        model: Model with values.
        placement: Devices on which the model's tensors are stored, and on which its parts run.
        folder: Offload folder for tensors that are placed on disk and are not in a mapped file yet, or None.
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices.
        preload: Names of classes whose weights are loaded together with those of their submodules.
        force_hooks: Whether hooks are attached even if they are not needed.
    """
    _move_home(map_locations(model), placement.homes, folder)
    homes = set(placement.homes.values())
    runs_elsewhere = homes == {CPU} and placement.main != CPU
    if force_hooks or len(homes) > 1 or DISK in homes or runs_elsewhere:
        skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        Execution(model, placement, skipped, preload or []).attach_hooks()
    model.hf_device_map = dict(placement.device_map)  # type: ignore[assignment]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory, and run the model on another device, to which weights are copied ahead of use.

    Args:
        model: Model to place, which is also returned.
        execution_device: Device that runs the model. None: this process's current accelerator, or the CPU if the
            machine has no accelerator. If it is the CPU, weights are used in place.
        offload_buffers: Whether buffers are offloaded, too. If False, they are on the execution device.
        state_dict: Values for parts on the meta device.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules.

    Raises:
        DeviceMapError: If this machine does not have the execution device.
        ConfigError: If a tensor has no values.
    """
    return dispatch_model(
        model,
        DeviceMap({"": "cpu"}),
        _resolve_execution_device(execution_device),
        state_dict,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: Device | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights on disk, and run the model on a device. Weights are read ahead of use.

    Args:
        model: Model to place, which is also returned.
        offload_dir: Folder for weights that are not in a mapped file yet. A file that an earlier call wrote for this
            model is reused.
        execution_device: Device that runs the model. None: this process's current accelerator, or the CPU if the
            machine has no accelerator.
        offload_buffers: Whether buffers are offloaded, too. If False, they are on the execution device.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules.

    Raises:
        DeviceMapError: If this machine does not have the execution device.
        ConfigError: If a tensor has no values, or the folder contains another model's weights.
    """
    return dispatch_model(
        model,
        DeviceMap({"": "disk"}),
        _resolve_execution_device(execution_device),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def get_default_device() -> torch.device:
    """Return this process's accelerator, or the CPU if this machine has no accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    # The index is needed, because a device without an index would be device 0 on every rank.
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _resolve_execution_device(execution_device: Device | torch.device | None) -> torch.device:
    """Return the device that the user gave, or the default device if it is None.

    Raises:
        DeviceMapError: If this machine does not have the device.
    """
    if execution_device is not None:
        return resolve_compute_device(execution_device, "execution_device")
    return get_default_device()


def _fill_meta_tensors(
    places: Mapping[str, TensorLocation],
    state_dict: Mapping[str, torch.Tensor] | None,
    index: Mapping[str, Mapping[str, object]] | None,
    folder: str | Path | None,
) -> None:
    """Replace tensors on the meta device with values from the user's state dict or, if missing there, from files.

    Tensors that are in neither stay on the meta device. Floating values are converted to the model's dtype.

    Args:
        places: Modules and attributes that hold each tensor of the model, by name.
        state_dict: Values by name, or None.
        index: Entries that locate values in files, by name, or None.
        folder: Offload folder with the files of the entries, or None.

    Raises:
        CheckpointError: If a file is missing or does not match its entry, or a value does not match the model.
    """
    if state_dict is None and index is None:
        return
    groups, stored = map_ties(places), OffloadedWeightsLoader(save_folder=folder, index=index or {})
    for name, place in places.items():
        if not place.tensor.is_meta:
            continue
        if state_dict is not None and name in state_dict:
            value = fit_value(name, place.tensor, state_dict[name], "the state dict")
            assign_value(places, groups[name], value, is_mapped=False)
        elif name in stored:
            value = fit_value(name, place.tensor, stored[name])
            assign_value(places, groups[name], value, stored.is_mapped(name, value.dtype))


def _move_home(places: Mapping[str, TensorLocation], homes: Mapping[str, Home], folder: str | Path | None) -> None:
    """Move every tensor to its target: a device, or a file on disk.

    If the target of a tensor is the disk and the tensor is not in a mapped file yet, it is first written to the offload
    folder.

    Args:
        places: Modules and attributes that hold each tensor of the model, by name.
        homes: Target of each tensor by name: a device, or "disk".
        folder: Offload folder, or None.

    Raises:
        ConfigError: If a tensor has no values, or an offload folder is needed and not given, or belongs to another
            model.
    """
    groups = map_ties(places)
    leaders = {name: group[0] for name, group in groups.items()}
    on_disk = [
        name
        for name, place in places.items()
        if homes[name] == DISK and leaders[name] == name and not is_mapped(place.tensor)
    ]
    specs = {name: TensorSpec(tuple(places[name].tensor.shape), places[name].tensor.dtype) for name in on_disk}
    values: dict[str, torch.Tensor] = {}
    if on_disk:
        values = _write_to_disk(places, on_disk, specs, folder)
    missing = [name for name, place in places.items() if place.tensor.is_meta and leaders[name] not in values]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors have no values: {', '.join(missing[:5])}; load a checkpoint first, or pass state_dict="
        )
    for name, value in values.items():
        assign_value(places, groups[name], value, is_mapped=True)
    for name, place in places.items():
        home = homes[name]
        if home == DISK or place.tensor.device == home:
            continue
        assert isinstance(home, torch.device)
        tied = [other for other in groups[name] if homes[other] == home]
        assign_value(places, tied, place.tensor.detach().to(home), is_mapped=False)


def _write_to_disk(
    places: Mapping[str, TensorLocation], names: Iterable[str], specs: dict[str, TensorSpec], folder: str | Path | None
) -> dict[str, torch.Tensor]:
    """Write tensors to the offload folder, and return them mapped from its file, by name.

    If none of the tensors has values, return those that an earlier run has written, or an empty dict.

    Args:
        places: Modules and attributes that hold each tensor of the model, by name.
        names: Names of the tensors to write.
        specs: Shape and dtype of each of these tensors, by name.
        folder: Offload folder, or None.

    Raises:
        ConfigError: If some of the tensors have no values, or the folder is missing or belongs to another model.
    """
    if all(places[name].tensor.is_meta for name in names):
        existing = find_existing(folder, specs)
        return {} if existing is None else {name: existing.tensors[name].tensor() for name in names}
    if folder is None:
        raise ConfigError(
            f"{len(specs)} tensors on disk are in no file that can be mapped: {', '.join(list(specs)[:5])}; give an offload folder"
        )
    missing = [name for name in names if places[name].tensor.is_meta]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors placed on disk have no values: {', '.join(missing[:5])}; load them first"
        )

    def iterate_values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, places[name].tensor

    written: dict[str, Any] = offload_tensors(folder, specs, "", iterate_values).tensors
    return {name: written[name].tensor() for name in names}
