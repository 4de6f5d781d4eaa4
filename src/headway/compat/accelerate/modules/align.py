"""Moving a module's weights to where it runs, for one forward or for a block of your code; and attaching that to a model's modules.

For code that is written against single hooks. `dispatch_model` does the same for whole models, reading ahead; what is here
brings weights when they are wanted. Outside of a forward a module holds real values wherever they can be held without
memory (in host memory, or mapped from a file), and what is written to a copy goes home.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Generic, ParamSpec

import torch
from torch import nn

from headway.compat.accelerate.modules.hooks import ModelHook, add_hook_to_module
from headway.offload.execution import device_stream_of
from headway.offload.offload_folder import OffloadedWeightsLoader, PrefixedDataset
from headway.offload.placement.device_map import home_of
from headway.runtime.collectives.tree import tensors, to_device
from headway.weights.names import TensorLocation, own_places, places_of

Where = torch.device | str | int
Tied = dict[int, dict[torch.device, torch.Tensor]]


@dataclass
class PlacedCopy:
    """A tensor whose copy hangs in its module.

    Attributes:
        home: what hung there before.
        version: of the copy when it came; None where torch counts none.
    """

    place: TensorLocation
    name: str
    home: torch.Tensor
    copy: torch.Tensor
    version: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.version = None if self.copy.is_inference() else self.copy._version


def _device(where: Where) -> torch.device:
    found = home_of(where) if isinstance(where, int) else torch.device(where)
    assert isinstance(found, torch.device)
    return torch.device("cpu") if found.type == "cpu" else found  # a tensor's device is never "cpu:0"


def _own_places(module: nn.Module, recurse: bool, has_buffers: bool) -> dict[str, TensorLocation]:
    found = places_of(module) if recurse else {place.leaf: place for place in own_places(module)}
    return {name: place for name, place in found.items() if place.is_parameter or has_buffers}


def _in_place_of(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as what hangs in the place of `old`: a parameter where that is one."""
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value


def _copied(home: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy to hang in the home's place; one that learns stays tied to its home, so that gradients come there."""
    if home.requires_grad and torch.is_grad_enabled():
        return home.to(device, copy=True)
    return _in_place_of(home, home.detach().to(device, copy=True))


def _hang(
    places: Mapping[str, TensorLocation],
    homes: Mapping[str, torch.Tensor],
    device: torch.device,
    tied: Tied | None = None,
) -> list[PlacedCopy]:
    """Hang copies of what is elsewhere; a tensor with several names is copied once."""
    uses: list[PlacedCopy] = []
    made: dict[int, torch.Tensor] = {}
    for name, place in places.items():
        home = homes[name]
        copy = home
        if home.device != device:
            known = None if tied is None else tied.get(home.data_ptr(), {}).get(device)
            copy = made[id(home)] if id(home) in made else known if known is not None else _copied(home, device)
            made[id(home)] = copy
            if tied is not None:
                tied.setdefault(home.data_ptr(), {})[device] = copy
        if place.tensor is not copy:
            uses.append(PlacedCopy(place, name, place.tensor, copy))
    for use in uses:
        use.place.put(use.copy)
    return uses


def write_home(home: torch.Tensor, use: PlacedCopy) -> None:
    """What was written to the copy in the meantime goes where it came from."""
    is_changed = use.version is not None and use.copy._version != use.version
    # Batch normalisation writes its running statistics past torch's count of versions.
    is_changed = is_changed or (use.place.module.training and not use.place.is_parameter)
    if is_changed and home is not use.copy and not (use.copy.is_meta or home.is_meta):
        with torch.no_grad():
            home.copy_(use.copy)


class AlignDevicesHook(ModelHook):
    """Moves a module's inputs and weights to the device that it runs on.

    Args:
        execution_device: where the forward runs; None: nothing is moved.
        offload: weights come there for each forward only; otherwise they move there once, when the hook is attached.
        io_same_device: the result goes back to where the first input was.
        weights_map: {name in the module: tensor} with the weights' values. None: the module's own, in host memory. Those
            of a dict or an OffloadedWeightsLoader hang in the module between forwards; of any other mapping, meta tensors do,
            and it is asked at each forward.
        offload_buffers: buffers come and go as well.
        place_submodules: also the weights of all modules inside.
        skip_keys: keyword arguments that are not moved.
        tied_params_map: {data_ptr: {device: copy}}, shared by several hooks: a tensor that several modules use within each
            other is copied once.
    """

    def __init__(
        self,
        execution_device: Where | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: Tied | None = None,
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
        self._uses: list[list[PlacedCopy]] = []

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    @property
    def _is_held(self) -> bool:
        """Are the values in the module between forwards?"""
        base = self.weights_map
        while isinstance(base, PrefixedDataset):
            base = base.dataset
        return base is None or isinstance(base, dict | OffloadedWeightsLoader)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the device, or back to their place."""
        places = self.note_devices(module)
        moved: dict[int, torch.Tensor] = {}
        for name, place in places.items():
            old = place.tensor
            is_offloaded = self.offload and (place.is_parameter or self.offload_buffers)
            if id(old) not in moved:
                moved[id(old)] = self._at_home(name, old) if is_offloaded else self._settled(old)
            if moved[id(old)] is not old:
                place.put(moved[id(old)])
        return module

    def note_devices(self, module: nn.Module) -> dict[str, TensorLocation]:
        """Note and return where the module's weights are, which is where they go when the hook is removed."""
        places = _own_places(module, self.place_submodules, True)
        self.original_devices = {name: place.tensor.device for name, place in places.items()}
        return places

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.execution_device is None or tensor.device == _device(self.execution_device):
            return tensor
        if self.offload and tensor.is_meta:
            return tensor  # a buffer that somebody else will fill
        return _in_place_of(tensor, tensor.detach().to(_device(self.execution_device)))

    def _at_home(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        stored = None
        if self.weights_map is not None:
            stored = self.weights_map[name] if self._is_held else tensor.detach().to("meta")
        # Embeddings that were resized get the hook of the old ones, whose values are not theirs.
        if stored is not None and stored.shape == tensor.shape:
            value = stored
        else:
            value = tensor if tensor.device.type in ("cpu", "meta") else tensor.detach().cpu()
        if value is tensor or not isinstance(tensor, nn.Parameter):
            return value
        return _in_place_of(tensor, value.detach())

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Weights and inputs to the device."""
        if self.io_same_device:
            first = next(tensors((args, kwargs)), None)
            self.input_device = None if first is None else first.device
        if self.execution_device is None:
            self._uses.append([])
            return args, kwargs
        device = _device(self.execution_device)
        uses: list[PlacedCopy] = []
        if self.offload and not any(self._uses):  # within itself, its copies hang already
            places = _own_places(module, self.place_submodules, self.offload_buffers)
            homes = {name: self._value(name, place) for name, place in places.items()}
            uses = _hang(places, homes, device, self.tied_params_map)
        self._uses.append(uses)
        skipped = {self.skip_keys} if isinstance(self.skip_keys, str) else set(self.skip_keys or ())
        kept = {name: value for name, value in kwargs.items() if name in skipped}
        moved = {name: value for name, value in kwargs.items() if name not in skipped}
        return to_device(args, device), {**to_device(moved, device), **kept}

    def _value(self, name: str, place: TensorLocation) -> torch.Tensor:
        if self._is_held:
            return place.tensor
        assert self.weights_map is not None
        return _in_place_of(place.tensor, self.weights_map[name])

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Weights back to their place, the result to the input's device."""
        for use in self._uses.pop() if self._uses else []:
            write_home(use.home, use)
            if use.place.tensor is not use.home:
                use.place.put(use.home)
            if self.tied_params_map is not None:
                self.tied_params_map.get(use.home.data_ptr(), {}).pop(use.copy.device, None)
        if self.io_same_device and self.input_device is not None and output is not None:
            return to_device(output, self.input_device)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Offloaded weights return to their former devices; those that had no values keep the ones they got."""
        if self.offload:
            for name, place in _own_places(module, self.place_submodules, self.offload_buffers).items():
                value, device = self._value(name, place), self.original_devices.get(name, torch.device("meta"))
                if device.type != "meta" and value.device != device:
                    value = _in_place_of(value, value.detach().to(device))
                if value is not place.tensor:
                    place.put(value)
        return module


def has_offloaded_params(module: nn.Module) -> bool:
    """Are the module's own weights stored elsewhere and moved to where it runs for its forward?

    True for modules with an offloading AlignDevicesHook, and for those of a dispatched model whose weights are copied to a
    device ahead of use. Weights that are used where they lie (a mapped file, on a CPU) are not offloaded in this sense.
    """
    hook = getattr(module, "_hf_hook", None)
    return (isinstance(hook, AlignDevicesHook) and hook.offload) or device_stream_of(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Where | None = None) -> Iterator[None]:
    """Move the module's own parameters to a device for the block, and back afterwards.

    What is written to them in the block is kept, also where they are offloaded.

    Args:
        module: its parameters, not those of modules inside it.
        execution_device: None: where the module runs (by its hook or its dispatched model), if that is known.
    """
    hook = getattr(module, "_hf_hook", None)
    own = hook if isinstance(hook, AlignDevicesHook) and hook.offload else None
    stream = device_stream_of(module)
    if execution_device is None and own is not None:
        execution_device = own.execution_device
    elif execution_device is None and stream is not None:
        execution_device = stream.device
    if execution_device is None:
        yield
        return
    places = _own_places(module, False, False)
    homes = {name: own._value(name, place) if own is not None else place.tensor for name, place in places.items()}
    with torch.no_grad():  # copies to look at and to write to are not part of a graph
        uses = _hang(places, homes, _device(execution_device))
    try:
        yield
    finally:
        for use in uses:
            write_home(homes[use.name], use)
            if use.place.tensor is not use.home:
                use.place.put(use.home)


# -------------------------------------------------------------------- attaching, each tree of modules in one walk


Given = ParamSpec("Given")


def _walk(module: nn.Module, whole: list[str] | None, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, is it one of the classes `whole`?), each module once, and nothing inside a whole one."""
    seen: set[int] = set()
    stack = [(prefix, module)]
    while stack:
        name, each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        is_whole = type(each).__name__ in (whole or ())
        yield name, each, is_whole
        if is_whole:
            seen.update(map(id, each.modules()))
        else:
            stack += [
                (f"{name}.{child}" if name else child, part) for child, part in reversed(list(each.named_children()))
            ]


Hooked = Iterator[tuple[nn.Module, AlignDevicesHook, bool]]
"""Modules and their hooks, and whether a hook that is there already stays beside the new one. Whoever takes a pair attaches it
before taking the next: what follows looks at it."""


class HookAttacher(Generic[Given]):
    """Decorates what gives hooks: a call attaches them to their modules; `hooks` gives them, to be attached as they come."""

    def __init__(self, hooks: Callable[Given, Hooked]) -> None:
        self.hooks = hooks
        update_wrapper(self, hooks)

    def __reduce__(self) -> str:
        return self.hooks.__name__

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> None:
        for module, hook, is_added in self.hooks(*args, **kwargs):
            add_hook_to_module(module, hook, append=is_added)


def _has_tensors(module: nn.Module) -> bool:
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))


@HookAttacher
def attach_align_device_hook(
    module: nn.Module,
    execution_device: Where | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> Hooked:
    """Attach an AlignDevicesHook to every module inside that has parameters or buffers of its own.

    Args:
        module: the root of the modules.
        execution_device, offload, offload_buffers, skip_keys, tied_params_map: as for AlignDevicesHook.
        weights_map: by the names of the whole model.
        module_name: the root's name in the whole model.
        preload_module_classes: classes whose modules use the weights of modules inside them without calling those: where
            weights are offloaded, all of theirs come in together.
    """
    for name, each, is_whole in _walk(module, preload_module_classes if offload else None, module_name):
        if _has_tensors(each) or is_whole:
            own = None if weights_map is None else PrefixedDataset(weights_map, f"{name}." if name else "")
            hook = AlignDevicesHook(
                execution_device,
                offload,
                weights_map=own,
                offload_buffers=offload_buffers,
                place_submodules=is_whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            yield each, hook, True


@HookAttacher
def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Where,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> Hooked:
    """Attach a hook that moves inputs and weights to a device to every module inside that holds weights and has no hook yet.

    Args:
        module: the root of the modules.
        execution_device: where they run.
        skip_keys, tied_params_map: as for AlignDevicesHook.
        preload_module_classes: modules of these classes get a hook, those inside them none.
    """
    holding = _holding(module)
    for _, each, _ in _walk(module, preload_module_classes):
        if id(each) in holding and not hasattr(each, "_hf_hook"):
            yield each, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map), False


def _holding(root: nn.Module) -> set[int]:
    """The ids of modules that hold tensors, themselves or further inside."""
    named = dict(root.named_modules(remove_duplicate=False))
    found: set[int] = set()
    for name, module in named.items():
        if _has_tensors(module):
            while True:
                found.add(id(named[name]))
                if not name:
                    break
                name = name.rpartition(".")[0]
    return found


@HookAttacher
def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Where | Mapping[str, Where] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Tied | None = None,
) -> Hooked:
    """Attach hooks to the blocks of a model: each block runs on its device, with its weights there or offloaded.

    Args:
        module: the model.
        execution_device: one for all, or {name of a block: device}; "" is the model itself.
        offload: one for all, or {name of a block: are its weights offloaded?}.
        weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map: as for attach_align_device_hook.
        module_name: the module's name in the whole model.
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
            yield module, hook, False
        return
    devices: Mapping[str, Where | None]
    if isinstance(execution_device, Mapping):
        devices = execution_device
    else:
        assert isinstance(offload, Mapping)
        devices = dict.fromkeys(offload, execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    for name, each, _ in list(_walk(module, None, module_name)):
        device, is_root = devices.get(name), name == ""
        if name in devices and name in offloads and not offloads[name]:
            hook = AlignDevicesHook(
                device, io_same_device=is_root, offload_buffers=offload_buffers, place_submodules=True, **shared
            )
            yield each, hook, False
            yield from attach_execution_device_hook.hooks(each, device, **shared)  # type: ignore[arg-type]
        elif name in devices and name in offloads:
            yield from attach_align_device_hook.hooks(each, device, module_name=name, **offloading)
            if not hasattr(each, "_hf_hook"):
                yield each, AlignDevicesHook(device, io_same_device=is_root, **shared), False
            preloaded = preload_module_classes
            yield from attach_execution_device_hook.hooks(each, device, preload_module_classes=preloaded, **shared)  # type: ignore[arg-type]
        elif is_root:
            yield each, AlignDevicesHook(device, io_same_device=True, **shared), False
