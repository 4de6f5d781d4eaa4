"""Hooks that move a module's weights to its execution device for one forward or for a `with` block.

Libraries and scripts attach these hooks to modules directly, as in Accelerate. The hooks load weights on demand,
whereas `dispatch_model` loads the weights of entire models ahead of their use. Weights in host memory or in a mapped
file stay in the module between forward passes, because they need no device memory. If a forward pass changes the copy
of a weight, the change is copied back.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, cast

import torch
from torch import nn

from headway.compat.accelerate.modules.hooks import ModelHook, add_hook_to_module
from headway.core.runtime.collectives.tree import list_tensors, to_device
from headway.core.weights.locations import TensorLocation, iterate_own_locations, map_locations
from headway.offload.execution import find_device_stream
from headway.offload.offload_folder import OffloadedWeightsLoader, PrefixedDataset
from headway.offload.placement.storage_devices import get_storage_device

DeviceLike = torch.device | str | int
TiedCopies = dict[int, dict[torch.device, torch.Tensor]]


@dataclass
class PlacedCopy:
    """Copy of a tensor that temporarily replaces it in its module.

    Attributes:
        location: Location of the tensor in its module.
        name: Name of the tensor.
        original: Original tensor, which the copy replaces.
        copy: Copy that is in the module now.
        version: The copy's version counter (`Tensor._version`) when it was placed in the module. None for inference
            tensors, which have no counter.
    """

    location: TensorLocation
    name: str
    original: torch.Tensor
    copy: torch.Tensor
    version: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.version = None if self.copy.is_inference() else self.copy._version


def _get_device(device_name: DeviceLike) -> torch.device:
    device = get_storage_device(device_name) if isinstance(device_name, int) else torch.device(device_name)
    assert isinstance(device, torch.device)
    return torch.device("cpu") if device.type == "cpu" else device  # tensors never report "cpu:0"


def _find_own_locations(module: nn.Module, recurse: bool, has_buffers: bool) -> dict[str, TensorLocation]:
    """Return the locations of a module's tensors by name.

    Args:
        module: Module that contains the tensors.
        recurse: Whether to include the tensors of submodules.
        has_buffers: Whether to include buffers.
    """
    locations = (
        map_locations(module) if recurse else {location.leaf: location for location in iterate_own_locations(module)}
    )
    return {name: location for name, location in locations.items() if location.is_parameter or has_buffers}


def _wrap_like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as a parameter if `old` is one. Otherwise return it unchanged."""
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value


def _copy_tensor(original: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on a device, which can replace the tensor in its module.

    The copy of a trainable tensor is part of the autograd graph, so that gradients reach the original tensor.
    """
    if original.requires_grad and torch.is_grad_enabled():
        return original.to(device, copy=True)
    return _wrap_like(original, original.detach().to(device, copy=True))


def _place_copies(
    locations: Mapping[str, TensorLocation],
    originals: Mapping[str, torch.Tensor],
    device: torch.device,
    tied: TiedCopies | None = None,
) -> list[PlacedCopy]:
    """Replace tensors that are not on `device` by copies on `device`, and return a `PlacedCopy` for each of them.

    A tensor with several names is copied once.

    Args:
        locations: Locations of the tensors by name.
        originals: Original tensors by name.
        device: Device of the copies.
        tied: Existing copies of tied tensors, by data pointer and device. New copies are added. None: no such copies.
    """
    placed: list[PlacedCopy] = []
    copies: dict[int, torch.Tensor] = {}
    for name, location in locations.items():
        original = originals[name]
        copy: torch.Tensor | None = None
        if original.device == device:
            copy = original
        elif id(original) in copies:
            copy = copies[id(original)]
        elif tied is not None:
            copy = tied.get(original.data_ptr(), {}).get(device)
        if copy is None:
            copy = _copy_tensor(original, device)
        if original.device != device:
            copies[id(original)] = copy
            if tied is not None:
                tied.setdefault(original.data_ptr(), {})[device] = copy
        if location.tensor is not copy:
            placed.append(PlacedCopy(location, name, location.tensor, copy))
    for placed_copy in placed:
        placed_copy.location.put_tensor(placed_copy.copy)
    return placed


def write_back(original: torch.Tensor, placed: PlacedCopy) -> None:
    """Write the values of a changed copy on the execution device back to the original tensor.

    Args:
        original: Original tensor.
        placed: Copy of the tensor. If it has not changed, nothing is copied.
    """
    is_changed = placed.version is not None and placed.copy._version != placed.version
    # Batch normalization updates its running statistics without incrementing torch's version counter.
    is_changed = is_changed or (placed.location.module.training and not placed.location.is_parameter)
    if is_changed and original is not placed.copy and not (placed.copy.is_meta or original.is_meta):
        with torch.no_grad():
            original.copy_(placed.copy)


class AlignDevicesHook(ModelHook):
    """Hook that moves a module's inputs and weights to its execution device.

    Args:
        execution_device: Device of the forward. None (the default): nothing is moved to a device.
        offload: Whether weights are moved to the device only for each forward. False (the default): they are moved
            once, when the hook is attached.
        io_same_device: Whether to move the output to the device of the first input. Default: False.
        weights_map: Values of the weights by name in the module. None (the default): the module's own weights, moved to
            host memory. With a dict or an OffloadedWeightsLoader, the module contains these values between forward
            passes. Any other mapping is read in each forward pass, and the module has meta tensors in between.
        offload_buffers: Whether buffers are offloaded too. Default: False.
        place_submodules: Whether to also move the weights of all submodules. Default: False.
        skip_keys: Names of keyword arguments that are not moved. None (the default): all are moved.
        tied_params_map: Copies of tensors by data pointer and device, which several hooks share. Nested modules that
            share a tensor then use one copy. None (the default): each hook makes its own copies.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        # A stack with one list per forward in progress. A recursive call adds an empty list.
        self._placed_copies: list[list[PlacedCopy]] = []

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    @property
    def _keeps_weights(self) -> bool:
        """Whether the module contains its weights, instead of meta tensors, between forward passes."""
        base = self.weights_map
        while isinstance(base, PrefixedDataset):
            base = base.dataset
        return base is None or isinstance(base, dict | OffloadedWeightsLoader)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's weights to the execution device, or offload them. Return the module."""
        locations = self.record_devices(module)
        new_tensors: dict[int, torch.Tensor] = {}
        for name, location in locations.items():
            old = location.tensor
            is_offloaded = self.offload and (location.is_parameter or self.offload_buffers)
            if id(old) not in new_tensors:
                new_tensors[id(old)] = (
                    self._offload_tensor(name, old) if is_offloaded else self._move_to_execution_device(old)
                )
            if new_tensors[id(old)] is not old:
                location.put_tensor(new_tensors[id(old)])
        return module

    def record_devices(self, module: nn.Module) -> dict[str, TensorLocation]:
        """Record the devices of the module's weights, and return the locations of the weights by name.

        `detach_hook` moves the weights back to the recorded devices.
        """
        locations = _find_own_locations(module, self.place_submodules, True)
        self.original_devices = {name: location.tensor.device for name, location in locations.items()}
        return locations

    def _move_to_execution_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the hook's execution device. Meta tensors of offloaded modules are returned unchanged."""
        if self.execution_device is None or tensor.device == _get_device(self.execution_device):
            return tensor
        if self.offload and tensor.is_meta:
            return tensor  # a meta tensor here is a buffer that other code fills later
        return _wrap_like(tensor, tensor.detach().to(_get_device(self.execution_device)))

    def _offload_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the module contains between forward passes if its weights are offloaded.

        Args:
            name: Name of the tensor in the module.
            tensor: Current tensor of the module.
        """
        stored = None
        if self.weights_map is not None:
            stored = self.weights_map[name] if self._keeps_weights else tensor.detach().to("meta")
        # Resized embeddings inherit the hook of the original embeddings, whose stored values have a different shape.
        if stored is not None and stored.shape == tensor.shape:
            value = stored
        else:
            value = tensor if tensor.device.type in ("cpu", "meta") else tensor.detach().cpu()
        if value is tensor or not isinstance(tensor, nn.Parameter):
            return value
        return _wrap_like(tensor, value.detach())

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move offloaded weights and the inputs to the execution device, and return the inputs.

        Without an execution device, nothing is moved. Keyword arguments in `skip_keys` are not moved.
        """
        if self.io_same_device:
            first_tensor = next(list_tensors((args, kwargs)), None)
            self.input_device = None if first_tensor is None else first_tensor.device
        if self.execution_device is None:
            self._placed_copies.append([])
            return args, kwargs
        device = _get_device(self.execution_device)
        placed: list[PlacedCopy] = []
        if self.offload and not any(self._placed_copies):  # in a recursive call, the copies are already in place
            locations = _find_own_locations(module, self.place_submodules, self.offload_buffers)
            originals = {name: self._get_placed_value(name, location) for name, location in locations.items()}
            placed = _place_copies(locations, originals, device, self.tied_params_map)
        self._placed_copies.append(placed)
        skipped = {self.skip_keys} if isinstance(self.skip_keys, str) else set(self.skip_keys or ())
        unmoved = {name: value for name, value in kwargs.items() if name in skipped}
        inputs = {name: value for name, value in kwargs.items() if name not in skipped}
        return to_device(args, device), {**to_device(inputs, device), **unmoved}

    def _get_placed_value(self, name: str, location: TensorLocation) -> torch.Tensor:
        """Return the tensor whose copy runs in the forward: the module's own, or the one in `weights_map`."""
        if self._keeps_weights:
            return location.tensor
        assert self.weights_map is not None
        return _wrap_like(location.tensor, self.weights_map[name])

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Replace the copies on the execution device by the original weights, and return the output.

        If `io_same_device` is set, the output is moved to the device of the first input.
        """
        for placed in self._placed_copies.pop() if self._placed_copies else []:
            write_back(placed.original, placed)
            if placed.location.tensor is not placed.original:
                placed.location.put_tensor(placed.original)
            if self.tied_params_map is not None:
                self.tied_params_map.get(placed.original.data_ptr(), {}).pop(placed.copy.device, None)
        if self.io_same_device and self.input_device is not None and output is not None:
            return to_device(output, self.input_device)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded weights back to their original devices, and return the module.

        Weights that were meta tensors when the hook was attached are not moved. They get their values in `weights_map`,
        if it is given.
        """
        if self.offload:
            for name, location in _find_own_locations(module, self.place_submodules, self.offload_buffers).items():
                value = self._get_placed_value(name, location)
                device = self.original_devices.get(name, torch.device("meta"))
                if device.type != "meta" and value.device != device:
                    value = _wrap_like(value, value.detach().to(device))
                if value is not location.tensor:
                    location.put_tensor(value)
        return module


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's own weights are stored elsewhere and copied to the execution device for its forward.

    True for a module with an offloading AlignDevicesHook. Also true for a module of a dispatched model if its weights
    are copied to a device ahead of their use. Weights that need no copy, such as a mapped file on a CPU, do not count.
    """
    hook = getattr(module, "_hf_hook", None)
    return (isinstance(hook, AlignDevicesHook) and hook.offload) or find_device_stream(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> Iterator[None]:
    """Return a context manager that moves a module's own parameters to a device, and back at its end.

    Changes to the parameters within the context are kept, even if the parameters are offloaded.

    Args:
        module: Module whose own parameters are moved. Parameters of its submodules are not moved.
        execution_device: Device within the context. None (the default): the device on which the module runs, according
            to its hook or its dispatched model. If neither is known, nothing is moved.
    """
    hook = getattr(module, "_hf_hook", None)
    offload_hook = hook if isinstance(hook, AlignDevicesHook) and hook.offload else None
    stream = find_device_stream(module)
    if execution_device is None and offload_hook is not None:
        execution_device = offload_hook.execution_device
    elif execution_device is None and stream is not None:
        execution_device = stream.device
    if execution_device is None:
        yield
        return
    locations = _find_own_locations(module, False, False)
    originals = {
        name: offload_hook._get_placed_value(name, location) if offload_hook is not None else location.tensor
        for name, location in locations.items()
    }
    with torch.no_grad():  # the block reads and writes the copies, but does not train them
        copies = _place_copies(locations, originals, _get_device(execution_device))
    try:
        yield
    finally:
        for placed in copies:
            write_back(originals[placed.name], placed)
            if placed.location.tensor is not placed.original:
                placed.location.put_tensor(placed.original)


# -------------------------------------------------------------------- attaching hooks to trees of modules


Params = ParamSpec("Params")


def _walk_modules(
    module: nn.Module, undivided_classes: list[str] | None, prefix: str = ""
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each module once, as a tuple of (name, module, whether its class is in `undivided_classes`).

    Submodules of a module whose class is in `undivided_classes` are left out.

    Args:
        module: Root of the modules.
        undivided_classes: Names of classes whose submodules are left out. None: no such classes.
        prefix: Name of the root. Default: "".
    """
    seen_ids: set[int] = set()
    stack = [(prefix, module)]
    while stack:
        name, each = stack.pop()
        if id(each) in seen_ids:
            continue
        seen_ids.add(id(each))
        is_undivided = type(each).__name__ in (undivided_classes or ())
        yield name, each, is_undivided
        if is_undivided:
            seen_ids.update(map(id, each.modules()))
        else:
            stack += [
                (f"{name}.{child}" if name else child, submodule)
                for child, submodule in reversed(list(each.named_children()))
            ]


class HookForModule(NamedTuple):
    """Hook to attach to a module.

    Attributes:
        module: Module.
        hook: Hook.
        keeps_existing: Whether a hook that the module already has also runs. False (the default): it is replaced.
    """

    module: nn.Module
    hook: AlignDevicesHook
    keeps_existing: bool = False


HookIterator = Iterator[HookForModule]
"""Iterator over hooks. Attach each hook before taking the next, because the iteration checks which modules have hooks."""


class HookAttacher(Protocol[Params]):
    """Function that attaches hooks to modules.

    Its attribute `hooks` is the generator function that yields the hooks without attaching them.
    """

    hooks: Callable[Params, HookIterator]

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> None: ...


def make_attacher(hooks: Callable[Params, HookIterator]) -> HookAttacher[Params]:
    """Convert a generator function that yields hooks to a function that attaches these hooks.

    Args:
        hooks: Generator function that yields the hooks and their modules.
    """

    @wraps(hooks)
    def attach_all(*args: Params.args, **kwargs: Params.kwargs) -> None:
        for module, hook, keeps_existing in hooks(*args, **kwargs):
            add_hook_to_module(module, hook, append=keeps_existing)

    attacher = cast(HookAttacher[Params], attach_all)
    attacher.hooks = hooks
    return attacher


def _has_tensors(module: nn.Module) -> bool:
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))


@make_attacher
def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> HookIterator:
    """Attach an AlignDevicesHook to the module and to every submodule that has its own parameters or buffers.

    Args:
        module: Root of the modules.
        execution_device, offload, offload_buffers, skip_keys, tied_params_map: As in AlignDevicesHook, with the same
            defaults.
        weights_map: Values of the weights by their full names in the model. None (the default): the modules' own
            weights.
        module_name: Name of the root in the model. Default: "".
        preload_module_classes: Names of module classes that use weights of their submodules without calling these
            submodules. With `offload`, all weights of such a module are moved together. None (the default): no such
            classes.
    """
    for name, each, is_undivided in _walk_modules(module, preload_module_classes if offload else None, module_name):
        if _has_tensors(each) or is_undivided:
            own_weights = None if weights_map is None else PrefixedDataset(weights_map, f"{name}." if name else "")
            hook = AlignDevicesHook(
                execution_device,
                offload,
                weights_map=own_weights,
                offload_buffers=offload_buffers,
                place_submodules=is_undivided,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            yield HookForModule(each, hook, keeps_existing=True)


@make_attacher
def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> HookIterator:
    """Attach hooks that move the inputs and weights of modules to a device.

    Modules that already have a hook get no other one. Modules that contain no tensors, directly or in submodules, get
    no hook.

    Args:
        module: Root of the modules.
        execution_device: Device on which the modules run.
        skip_keys: Names of keyword arguments that are not moved. None (the default): all are moved.
        preload_module_classes: Class names of modules whose submodules get no hook.
            None (the default): no such classes.
        tied_params_map: Copies of tied weights by data pointer and device, which the hooks share. None (the default):
            nothing is shared.
    """
    modules_with_tensors = _find_modules_with_tensors(module)
    for _, each, _ in _walk_modules(module, preload_module_classes):
        if id(each) in modules_with_tensors and not hasattr(each, "_hf_hook"):
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            yield HookForModule(each, hook)


def _find_modules_with_tensors(root: nn.Module) -> set[int]:
    """Return the IDs of the modules that contain tensors, directly or in submodules. The root can be one of them."""
    # Duplicates are kept, so that a module with several names also marks the parents of each of its names.
    modules = dict(root.named_modules(remove_duplicate=False))
    module_ids: set[int] = set()
    for name, module in modules.items():
        if _has_tensors(module):
            parts = name.split(".") if name else []
            module_ids.update(id(modules[".".join(parts[:count])]) for count in range(len(parts) + 1))
    return module_ids


@make_attacher
def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> HookIterator:
    """Attach hooks to a model's blocks, so that each block runs on its own device.

    A block's weights are on that device, or are offloaded and moved there for each forward.

    Args:
        module: Model.
        execution_device: Device of all blocks, or devices by block name, where "" is the name of the model itself.
            None (the default): modules are not moved.
        offload: Whether the weights of blocks are offloaded, for all blocks or by block name. Default: False.
        weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map: As in
            attach_align_device_hook, with the same defaults.
        module_name: Full name of the module in the model. Default: "".
    """
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    offloading: dict[str, Any] = {
        **shared,
        "offload": True,
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "preload_module_classes": preload_module_classes,
    }
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            yield from attach_align_device_hook.hooks(module, execution_device, module_name=module_name, **offloading)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
            yield HookForModule(module, hook)
        return
    devices: Mapping[str, DeviceLike | None]
    if isinstance(execution_device, Mapping):
        devices = execution_device
    else:
        assert isinstance(offload, Mapping)
        devices = dict.fromkeys(offload, execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    for name, each, _ in list(_walk_modules(module, None, module_name)):
        device: Any = devices.get(name)
        is_root = name == ""
        is_block = name in devices and name in offloads
        if is_block and offloads[name]:
            yield from attach_align_device_hook.hooks(each, device, module_name=name, **offloading)
            if not hasattr(each, "_hf_hook"):
                yield HookForModule(each, AlignDevicesHook(device, io_same_device=is_root, **shared))
            yield from attach_execution_device_hook.hooks(
                each, device, preload_module_classes=preload_module_classes, **shared
            )
        elif is_block:
            hook = AlignDevicesHook(
                device, io_same_device=is_root, offload_buffers=offload_buffers, place_submodules=True, **shared
            )
            yield HookForModule(each, hook)
            yield from attach_execution_device_hook.hooks(each, device, **shared)
        elif is_root:
            yield HookForModule(each, AlignDevicesHook(device, io_same_device=True, **shared))
