"""Placing a model's parts on devices, in host memory and on disk, and running it from there."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.errors import ConfigError
from headway.log import get_logger
from headway.offload.execution import Execution, undispatch
from headway.offload.load import check_kind, load
from headway.offload.offload_folder import OffloadedWeightsLoader, existing, fitted, offload
from headway.offload.placement.budget import Device, check_presence
from headway.offload.placement.device_map import (
    CPU,
    DISK,
    DeviceMap,
    Home,
    Placement,
    compute_device,
    resolve_device_map,
    settle,
)
from headway.offload.placement.sizes import Dtype
from headway.weights.names import TensorLocation, assign, is_mapped, places_of, tied_groups
from headway.weights.shards import TensorSpec

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
    """Load a checkpoint into a model and place its parts; returns the model.

    Args:
        model: usually built under init_empty_weights().
        checkpoint: as for load_checkpoint_in_model().
        device_map: "auto", "balanced", "balanced_low_0", "sequential", one device for all, or {module name: device}.
            None loads without placing.
        max_memory: {device: bytes or "10GiB"} for the words above.
        no_split_module_classes: classes whose modules stay on one device; None: what the model says itself.
        skip_keys: keyword arguments of forwards that are not moved between devices.
        preload_module_classes: as for dispatch_model().

    The other arguments are those of load_checkpoint_in_model() and dispatch_model().

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit; the model is untouched.
        DeviceMapError: the map does not fit the model or the machine.
    """
    check_kind(full_state_dict)
    placement = None
    if device_map is not None:
        check_presence(max_memory)
        found = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
        placement = settle(model, found, None, offload_buffers)
    homes = None if placement is None else placement.homes
    load(model, checkpoint, homes, offload_folder, dtype, (), strict)
    if placement is not None:
        undispatch(model)
        _run(model, placement, offload_folder, skip_keys, preload_module_classes, force_hooks)
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
    """Place a model's parts and run it from there; returns the model, with the map as `hf_device_map`.

    Parts on an accelerator stay and run there. Parts on "cpu" and "disk" run on the main device: where that is an
    accelerator, their weights are copied ahead of use; where it is the CPU, they are used where they lie, and those on
    disk are read ahead. Outside of a forward every weight holds its real values, so a state dict is that of the
    undivided model. A model that has been dispatched before is placed again.

    Args:
        device_map: as for load_checkpoint_and_dispatch().
        main_device: where offloaded parts run; None: the first accelerator in the map, else the CPU.
        state_dict: values for parts that are on the meta device.
        offload_dir: where weights go that are placed on "disk" and are not in a mapped file yet.
        offload_index: {name: {"safetensors_file": path, "weight_name": name there}} for values that are in files, or
            {name: {"dtype": ..., "shape": ...}} for `<name>.dat` in the offload folder, as read_offload_index() gives them.
        offload_buffers: also offload buffers; they are small, and stay on the main device otherwise.
        skip_keys: keyword arguments of forwards that are not moved between devices.
        preload_module_classes: classes whose modules use the weights of modules inside them without calling those;
            their weights are brought in together. torch's MultiheadAttention and TransformerEncoderLayer are known.
        force_hooks: attach hooks also where everything is on one device.

    Raises:
        DeviceMapError: the map does not fit the model or the machine.
        ConfigError: a tensor has no values, or the offload folder is missing or another model's.
    """
    undispatch(model)
    placement = settle(model, resolve_device_map(model, device_map), main_device, offload_buffers)
    _fill(places_of(model), state_dict, offload_index, offload_dir)
    _run(model, placement, offload_dir, skip_keys, preload_module_classes, force_hooks)
    return model


def _run(
    model: nn.Module,
    placement: Placement,
    folder: str | Path | None,
    skip_keys: str | list[str] | None,
    preload: list[str] | None,
    force_hooks: bool,
) -> None:
    """Move every tensor home and attach what runs the model from there."""
    _move(places_of(model), placement.homes, folder)
    kinds = set(placement.homes.values())
    if force_hooks or len(kinds) > 1 or DISK in kinds or kinds == {CPU} != {placement.main}:
        skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        Execution(model, placement, skipped, preload or []).attach()
    model.hf_device_map = dict(placement.device_map)  # type: ignore[assignment]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory and run on `execution_device`, each part's weights copied there ahead of its use.

    Args:
        execution_device: None: this process's current accelerator. On the CPU there is nothing to move.
        offload_buffers: also offload buffers.
        state_dict: values for parts that are on the meta device.
        preload_module_classes: as for dispatch_model().
    """
    return dispatch_model(
        model,
        DeviceMap({"": "cpu"}),
        _accelerator(execution_device),
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
    """Keep all weights on disk and run on `execution_device`, read ahead of use.

    Args:
        offload_dir: where weights are written that are in no mapped file yet. What an earlier call wrote of the same
            model is used again; another model's is refused.
        execution_device: None: this process's current accelerator, else the CPU.
        offload_buffers: also offload buffers.
        preload_module_classes: as for dispatch_model().

    Raises:
        ConfigError: the folder holds another model's weights.
    """
    return dispatch_model(
        model,
        DeviceMap({"": "disk"}),
        _accelerator(execution_device),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def default_device() -> torch.device:
    """This process's accelerator; the CPU where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # With its index: without one it would be the first device on every rank.
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def _accelerator(given: Device | torch.device | None) -> torch.device:
    if given is not None:
        return compute_device(given, "execution_device")
    return default_device()


def _fill(
    places: Mapping[str, TensorLocation],
    state_dict: Mapping[str, torch.Tensor] | None,
    index: Mapping[str, Mapping[str, object]] | None,
    folder: str | Path | None,
) -> None:
    """Give values to what is on the meta device, from the caller's state dict and files."""
    if state_dict is None and index is None:
        return
    groups, stored = tied_groups(places), OffloadedWeightsLoader(save_folder=folder, index=index or {})
    for name, place in places.items():
        if not place.tensor.is_meta:
            continue
        if state_dict is not None and name in state_dict:
            assign(places, groups[name], state_dict[name], is_mapped=False)
        elif name in stored:
            value = fitted(name, place.tensor, stored[name])
            assign(places, groups[name], value, stored.is_mapped(name, value.dtype))


def _move(places: Mapping[str, TensorLocation], homes: Mapping[str, Home], folder: str | Path | None) -> None:
    """Move every tensor home; what goes to disk and is in no mapped file is written to the folder first."""
    groups = tied_groups(places)
    leaders = {name: group[0] for name, group in groups.items()}
    on_disk = [
        name
        for name, place in places.items()
        if homes[name] == DISK and leaders[name] == name and not is_mapped(place.tensor)
    ]
    specs = {name: TensorSpec(tuple(places[name].tensor.shape), places[name].tensor.dtype) for name in on_disk}
    values: dict[str, torch.Tensor] = {}
    if on_disk:
        values = _written(places, on_disk, specs, folder)
    empty = [name for name, place in places.items() if place.tensor.is_meta and leaders[name] not in values]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors have no values: {', '.join(empty[:5])}; load a checkpoint first, or pass state_dict="
        )
    for name, value in values.items():
        assign(places, groups[name], value, is_mapped=True)
    for name, place in places.items():
        home = homes[name]
        if home == DISK or place.tensor.device == home:
            continue
        assert isinstance(home, torch.device)
        together = [other for other in groups[name] if homes[other] == home]
        assign(places, together, place.tensor.detach().to(home), is_mapped=False)


def _written(
    places: Mapping[str, TensorLocation], names: Iterable[str], specs: dict[str, TensorSpec], folder: str | Path | None
) -> dict[str, torch.Tensor]:
    if all(places[name].tensor.is_meta for name in names):
        found = existing(folder, specs)
        return {} if found is None else {name: found.tensors[name].tensor() for name in names}
    if folder is None:
        raise ConfigError(
            f"{len(specs)} tensors on disk are in no file that can be mapped: {', '.join(list(specs)[:5])}; give an offload folder"
        )
    empty = [name for name in names if places[name].tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors placed on disk have no values: {', '.join(empty[:5])}; load them first"
        )

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, places[name].tensor

    written: dict[str, Any] = offload(folder, specs, "", values).tensors
    return {name: written[name].tensor() for name in names}
