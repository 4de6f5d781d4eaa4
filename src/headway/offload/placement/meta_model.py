"""Build models without memory, or directly on a device, with torch's own modes and registration hooks."""

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from headway.common import env
from headway.common.callsite import walk_stack
from headway.errors import MetaModelError
from headway.offload._torch import DisableTorchFunction

_META = torch.device("meta")
_LARGE = 1 << 16
"""Minimum number of elements of a new tensor that is replaced by a placeholder.

A placeholder is a meta tensor that takes no memory. Large tensors are worth replacing because they might become
parameters.
"""

_OWN_FILE = __file__
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_FILLERS = frozenset(
    """
    uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    orthogonal_ fill_ zero_ random_
    """.split()  # noqa: SIM905
)
"""Names of functions that fill a tensor with values.

Names are compared because some libraries replace the functions of torch.nn.init by wrappers.
"""
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
"""torch functions that create a tensor, and whose result can be replaced by a placeholder without values."""
_VALUE_FREE_ATTRIBUTES = (
    "shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf", "grad", "grad_fn", "is_quantized", "is_sparse",
)  # fmt: skip
"""Attributes that do not depend on a tensor's values.

They can be read from a placeholder, which has no values, without creating the real tensor.
"""
_VALUE_FREE_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex")
"""Methods that do not depend on a tensor's values.

They can be called on a placeholder, which has no values, without creating the real tensor.
"""
_VALUE_FREE_FUNCTIONS = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _VALUE_FREE_ATTRIBUTES}
    | {getattr(torch.Tensor, name) for name in _VALUE_FREE_METHODS}
    | {torch.is_floating_point, torch.is_complex}
)
"""torch functions that correspond to the attributes in `_VALUE_FREE_ATTRIBUTES` and the methods in `_VALUE_FREE_METHODS`."""


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Return a context that builds models without memory: parameters created in it are on the meta device.

    Such a model has shapes and dtypes, but no values. Load them with `load_checkpoint_and_dispatch`, or with
    `Accelerator.load_weights` before `prepare`. Tied weights stay tied. Contexts can be nested, and the innermost one
    applies. Other threads are not affected. All changes to torch are undone when the context ends, even after an error.

    Args:
        include_buffers: Whether buffers are on the meta device, too. None (the default): the value of the environment
            variable `HEADWAY_INIT_INCLUDE_BUFFERS`, or False if it is not set. Buffers that no checkpoint contains, such
            as the frequencies of rotary embeddings, need values.

    Raises:
        MetaModelError: If a constructor reads a value that a meta tensor does not have. The message names the modules.

    Example::

        with init_empty_weights():
            model = torch.nn.Linear(100_000, 100_000)
        assert model.weight.is_meta
    """
    return init_on_device(_META, include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context that builds models whose parameters are on `device` from the start.

    Other threads are not affected. All changes to torch are undone when the context ends, even after an error.

    Args:
        device: Any value that torch.device accepts, such as "cuda:0" or "meta".
        include_buffers: Whether buffers are on `device`, too. None (the default): the value of the environment variable
            `HEADWAY_INIT_INCLUDE_BUFFERS`, or False if it is not set. With True, all tensors are created on `device`,
            as with `with torch.device(device)`. With False, each parameter is moved when a module registers it.

    Raises:
        MetaModelError: If `device` is the meta device, and a constructor reads a value that a meta tensor does not
            have.
    """
    # An empty tensor's device has an index, which the name 'cuda' alone does not have.
    exact_device = torch.empty(0, device=device).device
    if include_buffers is None:
        include_buffers = bool(env.get_bool("HEADWAY_INIT_INCLUDE_BUFFERS"))
    watch = _RegistrationWatch(exact_device, include_buffers)
    with exact_device if include_buffers else nullcontext(), _registration_hooks.install_watch(watch), watch:
        yield
        watch.make_remaining_real()


class _RegistrationWatch(TorchFunctionMode):
    """Torch function mode that moves new parameters to a device in `init_empty_weights` or `init_on_device`.

    Attributes:
        device: Device to which parameters are moved.
        creates_on_device: Whether `torch.device` creates all tensors on `device`. If False, only parameters are moved.
        uses_placeholders: Whether large new tensors are replaced by placeholders (meta tensors) until their use is
            known.
        placeholders: Pairs of a placeholder and the function that makes the real tensor, by `id` of the placeholder.
        moved_parameters: Pairs of the original and the moved parameter, by `id` of the original.
    """

    def __init__(self, device: torch.device, creates_on_device: bool) -> None:
        super().__init__()
        self.device = device
        self.creates_on_device = creates_on_device
        self.uses_placeholders = device == _META and not creates_on_device
        self.placeholders: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        # A parameter can be registered twice, under two names. Both registrations must give the same moved parameter.
        self.moved_parameters: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.device == _META and getattr(func, "__name__", "") in _FILLERS:
            target = args[0] if args else kwargs.get("tensor")
            if _is_meta(target) and id(target) not in self.placeholders:
                return target  # there is nothing to fill, and these calls would take most of the time
        if self.placeholders and func not in _VALUE_FREE_FUNCTIONS:
            self._make_real((args, tuple(kwargs.values())))
        if self.uses_placeholders and func in _FACTORIES and _count_elements(args, kwargs) >= _LARGE:
            return self._make_placeholder(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, MetaModelError) or "meta" not in str(error) or not _has_meta((args, kwargs)):
                raise
            raise MetaModelError(_explain_error(func, error, self.creates_on_device)) from error

    def _make_placeholder(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Create a placeholder for a large new tensor, on the meta device.

        The real tensor is created later, and only if it does not become a parameter.

        Args:
            func: torch function that creates the tensor.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if device == _META or kwargs.get("out") is not None:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        plain = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        placeholder: torch.Tensor = func(*args, **{**plain, "device": _META})
        self.placeholders[id(placeholder)] = (placeholder, lambda: func(*args, **{**kwargs, "device": device}))
        return placeholder

    def _make_real(self, value: Any) -> None:
        """Create the real tensors of the placeholders in `value`, because these tensors do not become parameters.

        Args:
            value: Tensor, or nested lists and tuples of tensors. Other values are ignored.
        """
        if isinstance(value, torch.Tensor):
            found = self.placeholders.pop(id(value), None)
            if found is not None:
                with DisableTorchFunction():
                    torch.utils.swap_tensors(found[0], found[1]())  # type: ignore[no-untyped-call]
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._make_real(item)

    def make_remaining_real(self) -> None:
        """Create real tensors for the placeholders that are still referenced after the model has been built.

        For example, a plain attribute of a module can refer to a placeholder.
        """
        self._forget_unused()
        self._make_real([placeholder for placeholder, _ in self.placeholders.values()])

    def _forget_unused(self) -> None:
        """Drop the placeholders that are referenced only by `placeholders`, because parameters have replaced them."""
        for key in list(self.placeholders):
            # An unused placeholder has two references: the pair in `placeholders`, and getrefcount's own argument.
            if sys.getrefcount(self.placeholders[key][0]) <= 2:
                del self.placeholders[key]

    def replace_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the parameter to register in place of a new one, or None to register the new one.

        Args:
            module: Module that registers the parameter.
            name: Name of the parameter in the module.
            parameter: New parameter.
        """
        self._forget_unused()
        if not isinstance(parameter, torch.Tensor):
            return None
        with DisableTorchFunction():
            if parameter.device == self.device:
                return None
            known = self.moved_parameters.get(id(parameter))
            if known is not None and known[0]() is parameter:
                return known[1]
            moved = _move_parameter(parameter, self.device)
        self.moved_parameters[id(parameter)] = (weakref.ref(parameter), moved)
        return moved

    def check_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """Replace a new buffer with a real tensor if it is a placeholder that was created without memory.

        Args:
            module: Module that registers the buffer.
            name: Name of the buffer in the module.
            buffer: New buffer, or None.

        Raises:
            MetaModelError: If the buffer is on the meta device because it was computed from parameters, but needs
                values.
        """
        self._make_real(buffer)
        if self.uses_placeholders and isinstance(buffer, torch.Tensor) and buffer.device == _META:
            owner = type(module).__name__
            raise MetaModelError(
                f"the buffer {name!r} of {owner} was computed from parameters, which have no values in a model built "
                f"without memory ({_describe_site()}). Pass include_buffers=True to leave it on the meta device too, and fill it "
                "from the checkpoint; or compute it from numbers, not from a parameter"
            )


class _RegistrationHooks:
    """Global torch hooks on the registration of parameters and buffers.

    They are installed while any thread is in an `init_empty_weights` or `init_on_device` context. In each thread, they
    use only the `_RegistrationWatch` of that thread.

    Attributes:
        thread_state: State of each thread. Its entry "stack" is the list of the watches of nested contexts.
        lock: Lock for changes to the two attributes below.
        num_contexts: Number of contexts that are open in all threads together.
        handles: Handles of the installed hooks.
    """

    def __init__(self) -> None:
        self.thread_state = threading.local()
        self.lock = threading.Lock()
        self.num_contexts = 0
        self.handles: list[Any] = []

    @contextmanager
    def install_watch(self, watch: _RegistrationWatch) -> Iterator[None]:
        """Return a context in which `watch` handles the parameters and buffers that this thread registers."""
        with self.lock:
            if self.num_contexts == 0:
                self.handles = [
                    register_module_parameter_registration_hook(self._on_parameter),  # type: ignore[arg-type]
                    register_module_buffer_registration_hook(self._on_buffer),
                ]
            self.num_contexts += 1
        stack = self.thread_state.__dict__.setdefault("stack", [])
        stack.append(watch)
        try:
            yield
        finally:
            stack.pop()
            with self.lock:
                self.num_contexts -= 1
                if self.num_contexts == 0:
                    for handle in self.handles:
                        handle.remove()

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the replacement of a parameter that a module registers, or None to keep it (registration hook)."""
        stack = self.thread_state.__dict__.get("stack")
        return (
            stack[-1].replace_parameter(module, name, parameter) if stack and not stack[-1].creates_on_device else None
        )

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        """Check a buffer that a module registers (registration hook)."""
        stack = self.thread_state.__dict__.get("stack")
        if stack and not stack[-1].creates_on_device:
            stack[-1].check_buffer(module, name, buffer)


_registration_hooks = _RegistrationHooks()


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter on a device, with the class and attributes of the original."""
    if isinstance(parameter, UninitializedParameter):
        parameter_class: Any = UninitializedParameter
        return parameter_class(requires_grad=parameter.requires_grad, device=device, dtype=parameter.dtype)  # type: ignore[no-any-return]
    data = parameter.detach().to(device)
    if type(parameter) is nn.Parameter:
        moved = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        # Subclasses, such as quantized weights, have constructors of their own, so only the type is kept.
        moved = data.as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)  # type: ignore[assignment]
    moved.__dict__.update(parameter.__dict__)
    return moved


def _count_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of elements that a call of a tensor factory such as `torch.empty` requests.

    Return 0 if the arguments do not determine the number.
    """
    size = kwargs.get("size", args[0] if args else 0)
    try:
        return math.prod(size if isinstance(size, (tuple, list)) else (n for n in args if type(n) is int))
    except TypeError:
        return 0


def _is_meta(value: Any) -> bool:
    """Whether a value is a tensor on the meta device. The query is not seen by torch function modes."""
    if not isinstance(value, torch.Tensor):
        return False
    with DisableTorchFunction():
        return value.is_meta


def _has_meta(values: Any) -> bool:
    """Whether nested containers contain a tensor on the meta device."""
    if isinstance(values, dict | list | tuple):  # includes subclasses that users define
        return any(map(_has_meta, values.values() if isinstance(values, dict) else values))
    return _is_meta(values)


def _explain_error(func: Callable[..., Any], error: Exception, creates_on_device: bool) -> str:
    """Return the message for an operation that failed because a meta tensor has no values.

    Args:
        func: torch function that failed.
        error: Error that it raised.
        creates_on_device: Whether buffers are created on the meta device, too.
    """
    advice = (
        "Pass include_buffers=False: buffers are then real, and only parameters have no values"
        if creates_on_device
        else "Compute the value from numbers, on the CPU, not from a parameter; or build this module outside the block"
    )
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
    return f"{_describe_site()} called {name} on a tensor of the meta device, which has no values ({error}). {advice}"


def _describe_site() -> str:
    """Return text with the classes of the modules whose methods are running, and the source line that they run.

    Classes are listed from the outermost to the innermost. The line is the innermost one outside of torch.
    """
    names: list[str] = []
    seen: list[nn.Module] = []
    line = ""
    for frame in walk_stack():
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if not line and not code.co_filename.startswith((_OWN_FILE, _TORCH_FOLDER)):
            line = f"{code.co_filename}:{frame.f_lineno}"
        if isinstance(module, nn.Module) and all(module is not other for other in seen):
            seen.append(module)
            names.append(type(module).__name__)
    return f"{' > '.join(reversed(names))} at {line}" if names else "code outside any module"
