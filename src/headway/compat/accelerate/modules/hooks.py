"""Hooks on modules: objects with pre_forward and post_forward, registered with torch and never in place of a forward."""

from typing import Any

import torch
from torch import nn

from headway.offload import EXECUTION
from headway.runtime.collectives.tree import to_device
from headway.runtime.transfers import move


class ModelHook:
    """Runs before and after a module's forward. Derive from it and attach with add_hook_to_module().

    Attributes:
        no_grad: run the forward under torch.no_grad().
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called once when attached."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gets the arguments of the forward and returns those to use."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Gets the forward's result and returns the one to use. After an error in the forward it gets None."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called once when removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other, in both directions in the order given."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach all."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each gets what the one before it returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each gets what the one before it returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach all."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _Attached:
    """One hook on one module: torch's handles and the contexts that are open."""

    def __init__(self, module: nn.Module, hook: ModelHook) -> None:
        self.hook = hook
        self._contexts: list[Any] = []
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = torch.no_grad() if self.hook.no_grad else None
        if context is not None:
            context.__enter__()
        self._contexts.append(context)
        return self.hook.pre_forward(module, *args, **kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        context = self._contexts.pop() if self._contexts else None
        if context is not None:
            context.__exit__(None, None, None)
        return self.hook.post_forward(module, output)

    def remove(self) -> None:
        """Unregister the hook from torch."""
        for handle in self._handles:
            handle.remove()


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook; `module._hf_hook` is the hook in force.

    Args:
        hook: what to attach.
        append: keep the present hook and run this one after it; False replaces it.
    """
    present, added = getattr(module, "_hf_hook", None), hook
    if present is not None:
        _detach(module)
        if append:
            hook = SequentialHook(present, added)
        else:
            module = present.detach_hook(module)
    module = added.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    module._headway_hook = _Attached(module, hook)  # type: ignore[assignment]
    return module


def show_hook(module: nn.Module, hook: ModelHook, append: bool = False) -> None:
    """Show a hook as a module's `_hf_hook` without calling it in forwards: something else does its work.

    Args:
        append: a hook that is there already stays, and goes on being called.
    """
    present = getattr(module, "_hf_hook", None)
    if present is not None and append:
        hook = SequentialHook(present, hook)
    elif present is not None:
        remove_hook_from_module(module)
    module._hf_hook = hook  # type: ignore[assignment]


def _detach(module: nn.Module) -> None:
    attached = module.__dict__.pop("_headway_hook", None)
    if attached is not None:
        attached.remove()
    module.__dict__.pop("_hf_hook", None)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook that add_hook_to_module() attached.

    Args:
        recurse: from all modules inside as well, and what dispatch_model() attached to the module or to one inside.
    """
    for each in list(module.modules()) if recurse else [module]:
        execution = vars(each).get(EXECUTION) if recurse else None
        if execution is not None:
            execution.remove()
        hook = getattr(each, "_hf_hook", None)
        _detach(each)
        if hook is not None:
            hook.detach_hook(each)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules inside it."""
    remove_hook_from_module(module, recurse=True)


class CpuOffload(ModelHook):
    """Keeps a whole model on the CPU until its forward begins; then it moves to the device, and stays there.

    Args:
        execution_device: where the forward runs; None: the first accelerator, else the CPU.
        prev_module_hook: of the model that was used before; it goes back to the CPU first.
    """

    def __init__(
        self,
        execution_device: torch.device | str | int | None = None,
        prev_module_hook: "UserCpuOffloadHook | None" = None,
    ) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        default = found if found is not None else torch.device("cpu")
        self.execution_device = torch.device(execution_device) if execution_device is not None else default
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """To the CPU."""
        move(module, torch.device("cpu"))
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, then move this one and the arguments to its device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        move(module, self.execution_device)
        return to_device(args, self.execution_device), to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model and its CpuOffload: what cpu_offload_with_hook() hands out."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU now."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until its forward; it stays on the device until the hook's `offload()`.

    For models used one after the other, some of them several times in a row.

    Args:
        execution_device: where it runs; None: the first accelerator, else the CPU.
        prev_module_hook: of the model used before, which goes back to the CPU when this one's forward begins.

    Returns:
        the model, and a hook with `offload()` and `remove()`.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
