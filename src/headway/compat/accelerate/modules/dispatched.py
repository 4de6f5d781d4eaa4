"""Accelerate's dispatch_model and related functions, which also show Accelerate's hooks on the dispatched modules.

PEFT, diffusers and transformers read `module._hf_hook` to find out where a module runs and whether its weights are
offloaded. These hooks work if a library calls them or attaches them to another module. But they are not registered on
the dispatched modules, because Headway's own runtime loads weights ahead of their use in the forward.
"""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.modules.align import (
    AlignDevicesHook,
    HookIterator,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    has_offloaded_params,
)
from headway.compat.accelerate.modules.greedy_map import get_balanced_memory, infer_auto_device_map, list_prefixes
from headway.compat.accelerate.modules.hooks import expose_hook, remove_hook_from_module
from headway.core.training.prepared.dispatched import EXECUTION
from headway.core.weights.locations import map_locations
from headway.errors import DeviceMapError
from headway.log import get_logger
from headway.offload import dispatch
from headway.offload.offload_folder import INDEX, OffloadedWeightsLoader, read_offload_index
from headway.offload.placement.automatic_map import STRATEGIES
from headway.offload.placement.budget import Device, check_budget_devices
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.sizes import Dtype

log = get_logger(__name__)

_OFFLOAD_PLACES = ("cpu", "disk")
"""Values in a device map for modules whose weights are offloaded if the model runs on an accelerator."""
DeviceLike = Device | torch.device
Weights = Mapping[str, torch.Tensor]
Index = Mapping[str, Mapping[str, object]]


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, DeviceLike],
    main_device: DeviceLike | None = None,
    state_dict: Weights | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model's parts on devices, set `_hf_hook` where Accelerate attaches hooks, and return the model.

    Args:
        model: Model to dispatch.
        device_map: Devices by names of modules or tensors. `accelerate.big_modeling.check_device_map` checks the map.
            Libraries can replace this function to allow tensors without a device. Such tensors are not moved.
        main_device, state_dict, offload_dir, offload_index, offload_buffers, skip_keys, preload_module_classes,
            force_hooks: As in `headway.dispatch_model`, with the same defaults.

    Raises:
        DeviceMapError: If the map has no device for some tensor, or does not match the machine's devices.
        ConfigError: If a tensor has no values, or the offload folder is missing or belongs to another model.
    """
    _remove_dispatch_hooks(model)
    if offload_index is None and offload_dir is not None:
        offload_index = _read_existing_index(model, offload_dir)
    dispatch.dispatch_model(
        model, _complete_map(model, device_map), main_device, state_dict, offload_dir, offload_index, offload_buffers, skip_keys,
        preload_module_classes, force_hooks,
    )  # fmt: skip
    if isinstance(device_map, Mapping):
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    has_stored_weights = state_dict is not None or offload_index is not None or offload_dir is not None
    _expose_mapped_hooks(
        model, main_device, has_stored_weights, offload_buffers, skip_keys, preload_module_classes, force_hooks
    )
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, DeviceLike] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
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
    """Load a checkpoint into a model, place its modules on devices, and set `_hf_hook` where Accelerate attaches hooks.

    Args:
        model: Model to load, on the meta device or not.
        checkpoint: File or directory of the checkpoint.
        device_map: Devices by names of modules or tensors. "auto", "balanced" and similar strategies create
            Accelerate's device maps. None (the default): the weights are loaded, but modules are not placed.
        max_memory, no_split_module_classes, offload_folder, offload_buffers, dtype, offload_state_dict, skip_keys,
            preload_module_classes, force_hooks, strict, full_state_dict, broadcast_from_rank0: As in
            `headway.load_checkpoint_and_dispatch`, with the same defaults.

    Raises:
        DeviceMapError: If a given map has no device for some tensor of the model's state dict.
    """
    _remove_dispatch_hooks(model)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        check_budget_devices(max_memory)
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model, max_memory, no_split_module_classes, dtype, low_zero=device_map == "balanced_low_0"
            )
        device_map = infer_auto_device_map(model, max_memory, no_split_module_classes, dtype)
    dispatch.load_checkpoint_and_dispatch(
        model, checkpoint, _complete_map(model, device_map), max_memory, no_split_module_classes, offload_folder, offload_buffers,
        dtype, offload_state_dict, skip_keys, preload_module_classes, force_hooks, strict, full_state_dict, broadcast_from_rank0,
    )  # fmt: skip
    if isinstance(device_map, Mapping):
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    if device_map is not None:
        _expose_mapped_hooks(
            model, None, offload_folder is not None, offload_buffers, skip_keys, preload_module_classes, force_hooks
        )
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Weights | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in host memory, and copy them to the device during the forward.

    Modules get the attribute `_hf_hook`, as in Accelerate.

    Args:
        model: Model to offload.
        execution_device: Device of the forward. None (the default): the model's device if it is an accelerator, else
            this process's accelerator, else the CPU.
        offload_buffers, state_dict, preload_module_classes: As in `headway.cpu_offload`, with the same defaults.
    """
    device = _choose_execution_device(model, execution_device)
    _remove_dispatch_hooks(model)
    dispatch.cpu_offload(model, device, offload_buffers, state_dict, preload_module_classes)
    _expose_offload_hooks(model, device, offload_buffers, preload_module_classes)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights on disk, and copy them to the execution device during the forward.

    The model is changed in place, and returned. Hooks of an earlier dispatch are replaced. Modules get the attribute
    `_hf_hook`, as in Accelerate.

    Args:
        model: Model to offload.
        offload_dir: Directory for the weights.
        execution_device: Device of the forward. None (the default): the model's device if it is an accelerator, else
            this process's accelerator, else the CPU.
        offload_buffers, preload_module_classes: As in `headway.disk_offload`, with the same defaults.
    """
    device = _choose_execution_device(model, execution_device)
    _remove_dispatch_hooks(model)
    dispatch.disk_offload(model, offload_dir, device, offload_buffers, preload_module_classes)
    _expose_offload_hooks(model, device, offload_buffers, preload_module_classes)
    return model


def _choose_execution_device(model: nn.Module, requested: DeviceLike | None) -> DeviceLike | None:
    """Return the device on which a model runs.

    Args:
        model: Model.
        requested: Device that the user has requested. None: the model's device, unless it is the CPU or the meta device.

    Returns:
        The device. None: this process's accelerator.
    """
    if requested is not None:
        device = torch.device(requested)
        return torch.device("cpu") if device.type == "cpu" else device  # "cpu:0" is the same device
    current_device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if current_device.type in ("cpu", "meta"):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return None if accelerator is not None else torch.device("cpu")
    return current_device


def _read_existing_index(model: nn.Module, folder: str | Path) -> Index | None:
    """Return an offload folder's index entries for the model's meta tensors, or None if there are none.

    Args:
        model: Model whose meta tensors are searched for in the index.
        folder: Folder with offloaded weights.
    """
    if not (Path(folder) / INDEX).is_file():
        return None
    index = read_offload_index(folder)
    meta_names = (name for name, location in map_locations(model).items() if location.tensor.is_meta)
    return {name: index[name] for name in meta_names if name in index} or None


def check_device_map(model: nn.Module, device_map: Mapping[str, DeviceLike]) -> None:
    """Check a device map: warn about names that are not modules of the model, and refuse a map that is incomplete.

    Raises:
        DeviceMapError: If the map has no device for some tensor of the model's state dict.
    """
    modules = dict(model.named_modules())
    if unknown_names := [name for name in device_map if name not in modules]:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown_names}",
            UserWarning,
            stacklevel=2,
        )
    if missing_names := [name for name in model.state_dict() if not _is_covered(name, device_map)]:
        raise DeviceMapError(
            f"The device_map provided does not give any device for the following parameters: {', '.join(missing_names)}"
        )


def _complete_map(model: nn.Module, device_map: Any) -> Any:
    """Check a device map, and return a map that Headway's functions accept. Other values are returned unchanged.

    Unknown names are removed. Tensors without an entry are added with their current devices, or with the CPU for meta
    tensors. The check is `accelerate.big_modeling.check_device_map`, which libraries can replace to allow such tensors.
    """
    if not isinstance(device_map, Mapping):
        return device_map
    module = sys.modules.get("accelerate.big_modeling")
    check_map = check_device_map if module is None else module.check_device_map
    check_map(model, device_map)
    locations, modules = map_locations(model), dict(model.named_modules())
    added: dict[str, DeviceLike] = {
        name: location.tensor.device if location.tensor.device.type != "meta" else torch.device("cpu")
        for name, location in locations.items()
        if not _is_covered(name, device_map)
    }
    return {name: device for name, device in device_map.items() if name in modules or name in locations} | added


def _is_covered(name: str, device_map: Mapping[str, DeviceLike]) -> bool:
    return any(prefix in device_map for prefix in list_prefixes(name))


def _remove_dispatch_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier dispatch from the model and its submodules. Other hooks are kept."""
    for module in list(model.modules()):
        if EXECUTION in vars(module):
            remove_hook_from_module(module, recurse=True)


def _expose_mapped_hooks(
    model: nn.Module,
    main_device: DeviceLike | None,
    has_stored_weights: bool,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
    preload: list[str] | None,
    force_hooks: bool,
) -> None:
    """Set `_hf_hook` on the modules of a model that was dispatched with a device map.

    As in Accelerate, nothing is set if the map has a single device other than the disk, unless `force_hooks` is set.

    Args:
        model: Dispatched model, with its device map in `hf_device_map`.
        main_device: Device of the model's inputs and outputs, and of modules that are offloaded. None: the device
            map's.
        has_stored_weights: Whether the weights on disk have values, from a state dict or an offload folder.
        offload_buffers, skip_keys, preload, force_hooks: As in `dispatch_model`.
    """
    device_map: Mapping[str, Any] = model.hf_device_map  # type: ignore[assignment]
    devices_in_map = set(device_map.values())
    if not (len(devices_in_map) > 1 or "disk" in devices_in_map or force_hooks):
        return
    root_device = DeviceMap(device_map).main_device if main_device is None else main_device
    runs_on_cpu = str(root_device) == "cpu"
    offloaded = ("disk",) if runs_on_cpu else _OFFLOAD_PLACES
    has_offloaded_disk_weights = "disk" in devices_in_map and has_stored_weights
    has_offloaded_cpu_weights = "cpu" in devices_in_map and not runs_on_cpu
    has_weights_map = has_offloaded_disk_weights or has_offloaded_cpu_weights
    execution_devices = {
        name: root_device if str(device) in _OFFLOAD_PLACES else device for name, device in device_map.items()
    }
    hooks = attach_align_device_hook_on_blocks.hooks(
        model,
        execution_device={**execution_devices, "": root_device},
        offload={name: str(device) in offloaded for name, device in device_map.items()},
        weights_map=OffloadedWeightsLoader(model.state_dict()) if has_weights_map else None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload,
    )
    _expose_hooks(hooks)


def _expose_offload_hooks(
    model: nn.Module, device: DeviceLike | None, offload_buffers: bool, preload: list[str] | None
) -> None:
    """Set `_hf_hook` on the modules of a model whose weights are all offloaded to host memory or disk.

    The model's `hf_device_map` is removed.

    Args:
        model: Offloaded model.
        device: Device on which the forward runs. None: this process's accelerator.
        offload_buffers: Whether buffers are offloaded, too.
        preload: Argument `preload_module_classes` of `cpu_offload`. None: no such classes.
    """
    vars(model).pop("hf_device_map", None)  # Accelerate sets none on a model that is offloaded as a whole
    if device is None:
        device = torch.accelerator.current_accelerator()
    expose_hook(model, AlignDevicesHook(io_same_device=True), append=True)
    weights = OffloadedWeightsLoader(model.state_dict())
    hooks = attach_align_device_hook.hooks(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload,
    )
    _expose_hooks(hooks)


def _expose_hooks(hooks: HookIterator) -> None:
    """Set each hook as the attribute `_hf_hook` of its module. It does not run, because the model is dispatched already."""
    for module, hook, keeps_existing in hooks:
        hook.record_devices(module)
        expose_hook(module, hook, append=keeps_existing)


# -------------------------------------------------------------------- weights of dispatched models


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with offloaded weights, with all tensors in host memory.

    Meta tensors whose values are not stored anywhere are left out with a warning. Unlike in Accelerate, tensors that
    belong to the model itself instead of a submodule are included.
    """
    state: dict[str, Any] = {}
    missing = set()
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        with align_module_device(module, torch.device("cpu")):
            for name, value in module.state_dict().items():
                if not isinstance(value, torch.Tensor):
                    state[dot + name] = value  # the extra state of a module
                elif value.is_meta:
                    missing.add(dot + name)
                else:
                    state[dot + name] = value.to("cpu")
    if missing - set(state):
        log.warning("left out, as they have no values: %s", ", ".join(sorted(missing - set(state))))
    return state


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Replace a module's weights in a state dict by their current values, in place, and return the state dict.

    Args:
        module: Module whose weights are read.
        module_name: Full name of any parameter of the module, such as "layers.0.weight". As in Accelerate, it is not
            the name of the module.
        state_dict: State dict with full names. Names that it does not contain are not added.
        device_to_put_offload: Device to which offloaded weights are copied. Default: "cpu".
    """
    before, dot, _ = module_name.rpartition(".")  # without a dot, the parameter belongs to the root module
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        values = {f"{before}{dot}{name}": value for name, value in module.state_dict().items()}
    state_dict.update({name: value for name, value in values.items() if name in state_dict})
    return state_dict
