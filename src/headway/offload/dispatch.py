"""Dispatch models: place their parts on devices, in host memory and on disk, and run them in place."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.core.weights.locations import TensorLocation, assign_value, is_mapped, map_locations, map_ties
from headway.core.weights.tensor_bytes import TensorSpec
from headway.errors import ConfigError
from headway.log import get_logger
from headway.offload.execution import Execution, undispatch_model
from headway.offload.offload_folder import OffloadedWeightsLoader, find_existing, fit_value, offload_tensors
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.budget import Device, check_budget_devices
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.sizes import Dtype
from headway.offload.placement.storage_devices import (
    CPU,
    DISK,
    Placement,
    StorageDevice,
    make_placement,
    resolve_compute_device,
)
from headway.offload.weight_loading import check_checkpoint_kind, load_weights

logger = get_logger(__name__)


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
    """Load a checkpoint into a model, place its parts on devices, and return the model, ready to be called.

    Parts on an accelerator run there. Parts on "cpu" and "disk" run on the main device, to which their weights are copied
    ahead of use. Host memory needs to hold only the parts on "cpu". No Accelerator is needed, and no rank waits.

    Args:
        model: Module, usually built under init_empty_weights().
        checkpoint: File, index, folder, or model ID on the Hugging Face Hub. Safetensors are preferred to `.bin` files.
        device_map: "auto" or "balanced" (spread evenly over the accelerators), "balanced_low_0" (leave the first one as
            free as possible), "sequential" (fill one device after another), one device for the whole model, or devices
            by module name. None (the default) loads the checkpoint without placing the parts on devices.
        max_memory: Memory limit of each device, in bytes or as text such as "10GiB". Used if `device_map` is "auto",
            "balanced", "balanced_low_0" or "sequential". None (the default): the memory that is free now.
        no_split_module_classes: Names of classes whose modules are not split over devices. None (the default): the
            classes that the model declares.
        offload_folder: Folder for weights on "disk" that cannot be used from their own file: converted weights and old
            `.bin` files. None (the default): no folder.
        offload_buffers: Whether buffers are offloaded, too. False (the default): they stay on the main device.
        dtype: Dtype in which floating weights are loaded. None (the default): the model's dtype.
        offload_state_dict: No effect. Accepted for compatibility with Accelerate.
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices. None (the default): all
            are moved.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules. None (the default): only torch's.
        force_hooks: Whether hooks are attached even if everything is on one device. Default: False.
        strict: Whether to raise CheckpointError if the checkpoint has names that the model lacks, or lacks persistent
            buffers of the model. Default: False.
        full_state_dict: Whether the checkpoint has full tensors. False is not supported. Default: True.
        broadcast_from_rank0: No effect, because all ranks on a machine share the pages of the mapped files.

    Returns:
        The object that was passed as `model`, whose training mode does not change. Its attribute `hf_device_map` is
        the device map, unless `device_map` is None.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or does not fit the model. The model is then
            unchanged.
        DeviceMapError: If the device map or `max_memory` does not match the model or the machine's devices.
        ConfigError: If `dtype` is not a dtype of torch, or an offload folder is needed and not given, or belongs to
            another model.
        UnsupportedError: If `full_state_dict=False` is given.

    Example::

        with init_empty_weights():
            model = build_model()
        model = load_checkpoint_and_dispatch(model, "weights", device_map="auto")
        outputs = model(inputs)
    """
    check_checkpoint_kind(full_state_dict)
    placement = None
    if device_map is not None:
        check_budget_devices(max_memory)
        resolved = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
        placement = make_placement(model, resolved, None, offload_buffers)
    storage_devices = None if placement is None else placement.storage_devices
    load_weights(model, checkpoint, storage_devices, offload_folder, dtype, (), strict)
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
        model: Model to place, with values.
        device_map: "auto" or "balanced" (spread evenly over the accelerators), "balanced_low_0" (leave the first one as
            free as possible), "sequential" (fill one device after another), one device for the whole model, or devices
            by module name, as from infer_auto_device_map.
        main_device: Device that runs offloaded parts. None (the default): the first accelerator in the map, else the
            CPU.
        state_dict: Values for parts on the meta device, by name. None (the default): no part is on the meta device.
        offload_dir: Folder for weights that are placed on "disk" and are not in a mapped file yet. None (the default):
            no folder.
        offload_index: Entries that locate values in files, by tensor name. An entry is either {"safetensors_file":
            path, "weight_name": name in that file}, or {"dtype": ..., "shape": ...} for `<name>.dat` in the offload
            folder, as returned by read_offload_index(). None (the default): no such entries.
        offload_buffers: Whether buffers are offloaded, too. False (the default): they stay on the main device, because
            they are small.
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices. None (the default): all
            are moved.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules. torch's MultiheadAttention and
            TransformerEncoderLayer are always included. Default: no others.
        force_hooks: Whether hooks are attached even if everything is on one device. Default: False.

    Raises:
        DeviceMapError: If the device map does not match the model or the machine's devices.
        ConfigError: If a tensor has no values, or an offload folder is needed and not given, or belongs to another
            model.
        CheckpointError: If a file of `offload_index` is missing, or a value from it or from `state_dict` does not match
            the model.

    Example::

        device_map = infer_auto_device_map(model)
        model = dispatch_model(model, device_map, offload_dir="offload")
        outputs = model(inputs)
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
        skip_keys: Names of keyword arguments of `forward` that are not moved between devices. None: all are moved.
        preload: Names of classes whose weights are loaded together with those of their submodules. None: no such
            classes.
        force_hooks: Whether hooks are attached even if they are not needed.
    """
    _move_to_storage(map_locations(model), placement.storage_devices, folder)
    storage_devices = set(placement.storage_devices.values())
    runs_elsewhere = storage_devices == {CPU} and placement.main != CPU
    if force_hooks or len(storage_devices) > 1 or DISK in storage_devices or runs_elsewhere:
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

    The copies are freed after use. Call the returned model as before. It is `dispatch_model` with the
    whole model on "cpu".

    Args:
        model: Model to dispatch. It is changed in place and returned.
        execution_device: Device that runs the model. None (the default): this process's current accelerator, or the CPU
            if the machine has no accelerator. If it is the CPU, weights are used in place.
        offload_buffers: Whether buffers are offloaded, too. False (the default): they are on the execution device.
        state_dict: Values for parts on the meta device, by name. None (the default): no part is on the meta device.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules. Default: only torch's.

    Raises:
        DeviceMapError: If this machine does not have the execution device.
        ConfigError: If a tensor has no values.
        CheckpointError: If a value of `state_dict` does not match the model.
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

    Call the returned model as before. It is `dispatch_model` with the whole model on "disk".

    Args:
        model: Model to dispatch. It is changed in place and returned.
        offload_dir: Folder for weights that are not in a mapped file yet. A file that an earlier call wrote for this
            model is reused.
        execution_device: Device that runs the model. None (the default): this process's current accelerator, or the CPU
            if the machine has no accelerator.
        offload_buffers: Whether buffers are offloaded, too. False (the default): they are on the execution device.
        preload_module_classes: Classes whose modules use the weights of submodules without calling the submodules. The
            weights of such a module are loaded together with those of its submodules. Default: only torch's.

    Raises:
        DeviceMapError: If this machine does not have the execution device.
        ConfigError: If a tensor has no values, or the folder contains another model's weights.
        CheckpointError: If the file cannot be written, or an existing file is damaged.
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


def _move_to_storage(
    places: Mapping[str, TensorLocation], storage_devices: Mapping[str, StorageDevice], folder: str | Path | None
) -> None:
    """Move every tensor to its target: a device, or a file on disk.

    If the target of a tensor is the disk and the tensor is not in a mapped file yet, it is first written to the offload
    folder.

    Args:
        places: Modules and attributes that hold each tensor of the model, by name.
        storage_devices: Target of each tensor by name: a device, or "disk".
        folder: Offload folder, or None.

    Raises:
        ConfigError: If a tensor has no values, or an offload folder is needed and not given, or belongs to another
            model.
    """
    groups = map_ties(places)
    leaders = {name: group[0] for name, group in groups.items()}
    # Of tied tensors, only the first is written.
    names_to_write = [
        name
        for name, place in places.items()
        if storage_devices[name] == DISK and leaders[name] == name and not is_mapped(place.tensor)
    ]
    specs = {name: TensorSpec(tuple(places[name].tensor.shape), places[name].tensor.dtype) for name in names_to_write}
    mapped_values: dict[str, torch.Tensor] = {}
    if names_to_write:
        mapped_values = _write_to_disk(places, names_to_write, specs, folder)
    missing = [name for name, place in places.items() if place.tensor.is_meta and leaders[name] not in mapped_values]
    if missing:
        raise ConfigError(
            f"{len(missing)} tensors have no values: {', '.join(missing[:5])}; load a checkpoint first, or pass state_dict="
        )
    for name, value in mapped_values.items():
        assign_value(places, groups[name], value, is_mapped=True)
    for name, place in places.items():
        device = storage_devices[name]
        if device == DISK or place.tensor.device == device:
            continue
        assert isinstance(device, torch.device)
        tied_names = [other for other in groups[name] if storage_devices[other] == device]
        assign_value(places, tied_names, place.tensor.detach().to(device), is_mapped=False)


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
