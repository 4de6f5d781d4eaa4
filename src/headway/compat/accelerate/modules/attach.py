"""Attaching AlignDevicesHooks to the modules of a model, each tree of modules in one walk."""

from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from typing import Any, Generic, ParamSpec

import torch
from torch import nn

from headway.compat.accelerate.modules.align import AlignDevicesHook, Tied, Where
from headway.compat.accelerate.modules.hooks import add_hook_to_module
from headway.offload.offload_folder import PrefixedDataset

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
