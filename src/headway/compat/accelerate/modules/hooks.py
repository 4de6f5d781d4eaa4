"""Module hooks with the methods pre_forward and post_forward, registered through torch's own hooks.

In contrast to Accelerate's hooks, they do not replace a module's forward method.
"""

from typing import Any

import torch
from torch import nn

from headway.core.runtime.collectives.tree import to_device
from headway.core.runtime.moving import move_module
from headway.core.training.prepared.dispatched import EXECUTION


class ModelHook:
    """Base class of hooks that run before and after a module's forward. Attach them with add_hook_to_module().

    A subclass overrides `pre_forward` to change the inputs, `post_forward` to change the output, or both. `init_hook` and
    `detach_hook` are called when the hook is attached and removed.

    Attributes:
        no_grad: Whether to run the forward under torch.no_grad(). Default: False.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is attached, and return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for the forward. The base class returns them unchanged."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the module's output, possibly changed. `output` is None if the forward raised an error."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module when the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Hook that runs several hooks in the given order, both before and after the forward.

    Args:
        hooks: Hooks to run, in order.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialize the module for all hooks in order, and return the module."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the forward, passed through all hooks in order."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output of the forward, passed through all hooks in order."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module for all hooks in order, and return the module."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class _HookRegistration:
    """Registration of a hook on a module: torch's handles, and the no_grad contexts of forwards in progress."""

    def __init__(self, module: nn.Module, hook: ModelHook) -> None:
        self.hook = hook
        self._contexts: list[Any] = []  # a stack, because a module's forward can call the module again
        self._handles = [
            module.register_forward_pre_hook(self._run_pre_forward, with_kwargs=True),
            module.register_forward_hook(self._run_post_forward, with_kwargs=True, always_call=True),
        ]

    def _run_pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a forward, passed through the hook. Disable gradients if the hook requests it."""
        context = torch.no_grad() if self.hook.no_grad else None
        if context is not None:
            context.__enter__()
        self._contexts.append(context)
        return self.hook.pre_forward(module, *args, **kwargs)

    def _run_post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of a forward, passed through the hook, after gradients are enabled again."""
        context = self._contexts.pop() if self._contexts else None
        if context is not None:
            context.__exit__(None, None, None)
        return self.hook.post_forward(module, output)

    def remove(self) -> None:
        """Unregister the hook from the module's forward."""
        for handle in self._handles:
            handle.remove()


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module and return the module.

    The hook's `init_hook` prepares the module. The attribute `module._hf_hook` is set to the hook. If `append` is set
    and the module already has a hook, the attribute is set to a `SequentialHook` of the existing hook and the new one.

    Args:
        module: Module to attach the hook to.
        hook: Hook to attach.
        append: Whether to keep an existing hook and run the new one after it. False (the default): replace the existing
            hook, whose `detach_hook` restores the module first.
    """
    existing = getattr(module, "_hf_hook", None)
    combined = hook
    if existing is not None:
        _detach_hook(module)
        if append:
            combined = SequentialHook(existing, hook)
        else:
            module = existing.detach_hook(module)
    module = hook.init_hook(module)  # not `combined`, because the existing hook has already initialized the module
    module._hf_hook = combined  # type: ignore[assignment]
    module._headway_hook = _HookRegistration(module, combined)  # type: ignore[assignment]
    return module


def expose_hook(module: nn.Module, hook: ModelHook, append: bool = False) -> None:
    """Set a module's attribute `_hf_hook` without registering the hook, so that forward passes do not call it.

    Headway's runtime already moves the weights of such a module. Other libraries look for the attribute.

    Args:
        module: Module that gets the attribute.
        hook: Hook to set.
        append: Whether to keep an existing hook registered. False (the default): remove it.
    """
    existing = getattr(module, "_hf_hook", None)
    exposed = hook
    if existing is not None and append:
        exposed = SequentialHook(existing, hook)
    elif existing is not None:
        remove_hook_from_module(module)
    module._hf_hook = exposed  # type: ignore[assignment]


def _detach_hook(module: nn.Module) -> None:
    """Unregister a module's hook and delete its attribute, without calling the hook's `detach_hook`."""
    attachment = module.__dict__.pop("_headway_hook", None)
    if attachment is not None:
        attachment.remove()
    module.__dict__.pop("_hf_hook", None)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, let the hook's `detach_hook` restore the module, and return the module.

    Args:
        module: Module to remove the hook from.
        recurse: Whether to also remove the hooks of all submodules, including those that dispatch_model() attached.
            Default: False.
    """
    for each in list(module.modules()) if recurse else [module]:
        execution = vars(each).get(EXECUTION) if recurse else None
        if execution is not None:
            execution.remove_hooks()
        hook = getattr(each, "_hf_hook", None)
        _detach_hook(each)
        if hook is not None:
            hook.detach_hook(each)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    remove_hook_from_module(module, recurse=True)


class CpuOffload(ModelHook):
    """Hook that keeps a model on the CPU until its forward. The model then moves to the device and stays there.

    Args:
        execution_device: Device of the forward. None (the default): the current accelerator, else the CPU.
        prev_module_hook: Hook of another model, as returned by `cpu_offload_with_hook`. Before each forward, that model
            is moved back to the CPU. None (the default): no other model is moved.
    """

    def __init__(
        self,
        execution_device: torch.device | str | int | None = None,
        prev_module_hook: "UserCpuOffloadHook | None" = None,
    ) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        default = accelerator if accelerator is not None else torch.device("cpu")
        self.execution_device = torch.device(execution_device) if execution_device is not None else default
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU, and return the model."""
        move_module(module, torch.device("cpu"))
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the model of `prev_module_hook` to the CPU, then this model and its inputs to the device.

        Return the moved inputs.
        """
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        move_module(module, self.execution_device)
        return to_device(args, self.execution_device), to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """Handle for a model with a CpuOffload hook, returned by cpu_offload_with_hook().

    Args:
        model: Model with the hook.
        hook: Hook of the model.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model. The model is not moved."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: torch.device | str | int | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward, and then on the device until the hook's `offload()` is called.

    Use it for models that run one after the other, of which some run several times in a row.

    Args:
        model: Model to offload.
        execution_device: Device of the forward. None (the default): the current accelerator, else the CPU.
        prev_module_hook: Hook of the model that runs before this one. That model is moved back to the CPU when this
            model's forward begins. None (the default): there is no such model.

    Returns:
        The model, and a hook with the methods `offload()` and `remove()`.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
