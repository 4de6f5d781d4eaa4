"""Meta models: models built without memory, or built directly on a device, by torch's own modes and registration hooks."""

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
from headway.common.callsite import stack
from headway.errors import MetaModelError

_META = torch.device("meta")
# A tensor of this many elements is held back until it is known whether it becomes a parameter.
_LARGE = 1 << 16


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Build models without memory: every parameter created in the block lies on torch's meta device.

    Tied weights stay tied, blocks nest (the innermost counts), and other threads are not concerned. Nothing of torch stays
    changed after the block, however it ends.

    Args:
        include_buffers: put buffers on the meta device too. None reads `HEADWAY_INIT_INCLUDE_BUFFERS`, and is False
            where that is not set: buffers are then real, which those that no checkpoint holds (a rotary embedding's
            frequencies) need.

    Raises:
        MetaModelError: a constructor read a value that a meta tensor does not have. The message names the modules.
    """
    return init_on_device(_META, include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models whose parameters lie on `device` from the start.

    Args:
        device: anything torch.device takes.
        include_buffers: as of init_empty_weights. True is `with torch.device(device)`: all tensors are made there.
            With False every parameter is moved as it is registered.

    Raises:
        MetaModelError: on the meta device, as of init_empty_weights.
    """
    # An empty tensor says which device is meant: 'cuda' alone names none.
    place = torch.empty(0, device=device).device
    if include_buffers is None:
        include_buffers = bool(env.get_bool("HEADWAY_INIT_INCLUDE_BUFFERS"))
    watch = _RegistrationWatch(place, include_buffers)
    with place if include_buffers else nullcontext(), _hooks.open(watch), watch:
        yield
        watch.settle()


class _RegistrationWatch(TorchFunctionMode):
    """What torch functions do inside the block, on this thread alone.

    Attributes:
        place: where parameters go.
        is_whole: do all tensors go there (torch.device does that), or parameters only?
    """

    def __init__(self, place: torch.device, is_whole: bool) -> None:
        super().__init__()
        self.place = place
        self.is_whole = is_whole
        self.holds_back = place == _META and not is_whole
        # id -> (the meta stand-in, what makes the real tensor)
        self.held: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        # A parameter may be registered twice, under two names: the second time gives the same result.
        self.moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.place == _META and getattr(func, "__name__", "") in _FILLERS:
            target = args[0] if args else kwargs.get("tensor")
            if _is_meta(target) and id(target) not in self.held:
                return target  # Nothing to fill: most of the time of a meta model would go there.
        if self.held and func not in _DESCRIPTIONS:
            self._make_real((args, tuple(kwargs.values())))
        if self.holds_back and func in _FACTORIES and _num_elements(args, kwargs) >= _LARGE:
            return self._stand_in(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, MetaModelError) or "meta" not in str(error) or not _any_meta((args, kwargs)):
                raise
            raise MetaModelError(_explanation(func, error, self.is_whole)) from error

    def _stand_in(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Make a large new tensor on the meta device, and its values only if it turns out to be no parameter."""
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if device == _META or kwargs.get("out") is not None:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        plain = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        shadow: torch.Tensor = func(*args, **{**plain, "device": _META})
        self.held[id(shadow)] = (shadow, lambda: func(*args, **{**kwargs, "device": device}))
        return shadow

    def _make_real(self, value: Any) -> None:
        """Give stand-ins in `value` their values: something else than a parameter is made of them."""
        if isinstance(value, torch.Tensor):
            found = self.held.pop(id(value), None)
            if found is not None:
                with torch._C.DisableTorchFunction():
                    torch.utils.swap_tensors(found[0], found[1]())  # type: ignore[no-untyped-call]
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._make_real(item)

    def settle(self) -> None:
        """At the end of the block: stand-ins that something still refers to (a plain attribute) become real."""
        self._forget_unused()
        self._make_real([shadow for shadow, _ in self.held.values()])

    def _forget_unused(self) -> None:
        """Drop stand-ins that became a parameter: nothing but `held` refers to them."""
        for key in list(self.held):
            # Two: the pair in `held`, and getrefcount's own argument.
            if sys.getrefcount(self.held[key][0]) <= 2:
                del self.held[key]

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """What is registered in place of `parameter`; None keeps it."""
        self._forget_unused()
        if not isinstance(parameter, torch.Tensor):
            return None
        with torch._C.DisableTorchFunction():
            if parameter.device == self.place:
                return None
            known = self.moved.get(id(parameter))
            if known is not None and known[0]() is parameter:
                return known[1]
            moved = _moved(parameter, self.place)
        self.moved[id(parameter)] = (weakref.ref(parameter), moved)
        return moved

    def on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """Buffers are real: one that was held back gets its values now."""
        self._make_real(buffer)
        if self.holds_back and isinstance(buffer, torch.Tensor) and buffer.device == _META:
            owner = type(module).__name__
            raise MetaModelError(
                f"the buffer {name!r} of {owner} was computed from parameters, which have no values in a model built "
                f"without memory ({_site()}). Pass include_buffers=True to leave it on the meta device too, and fill it "
                "from the checkpoint; or compute it from numbers, not from a parameter"
            )


class _Hooks:
    """torch's two registration hooks, in place while any thread is in a block, asking only the own thread's."""

    def __init__(self) -> None:
        self.mine = threading.local()
        self.lock = threading.Lock()
        self.num_open = 0
        self.handles: list[Any] = []

    @contextmanager
    def open(self, watch: _RegistrationWatch) -> Iterator[None]:
        """Let `watch` decide about what this thread registers, for the block."""
        with self.lock:
            if self.num_open == 0:
                self.handles = [
                    register_module_parameter_registration_hook(self._on_parameter),  # type: ignore[arg-type]
                    register_module_buffer_registration_hook(self._on_buffer),
                ]
            self.num_open += 1
        stack = self.mine.__dict__.setdefault("stack", [])
        stack.append(watch)
        try:
            yield
        finally:
            stack.pop()
            with self.lock:
                self.num_open -= 1
                if self.num_open == 0:
                    for handle in self.handles:
                        handle.remove()

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        stack = self.mine.__dict__.get("stack")
        return stack[-1].on_parameter(module, name, parameter) if stack and not stack[-1].is_whole else None

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        stack = self.mine.__dict__.get("stack")
        if stack and not stack[-1].is_whole:
            stack[-1].on_buffer(module, name, buffer)


_hooks = _Hooks()


def _moved(parameter: nn.Parameter, place: torch.device) -> nn.Parameter:
    """The parameter on `place`, of its own class and with its own attributes."""
    if isinstance(parameter, UninitializedParameter):
        made: Any = UninitializedParameter
        return made(requires_grad=parameter.requires_grad, device=place, dtype=parameter.dtype)  # type: ignore[no-any-return]
    data = parameter.detach().to(place)
    if type(parameter) is nn.Parameter:
        moved = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        # Subclasses (e.g. quantised weights) have constructors of their own: the tensor's type is what has to survive.
        moved = data.as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)  # type: ignore[assignment]
    moved.__dict__.update(parameter.__dict__)
    return moved


def _num_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many elements a call of a factory asks for; 0 where its arguments do not say so plainly."""
    size = kwargs.get("size", args[0] if args else 0)
    try:
        return math.prod(size if isinstance(size, (tuple, list)) else (n for n in args if type(n) is int))
    except TypeError:
        return 0


def _is_meta(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return value.is_meta


def _any_meta(values: Any) -> bool:
    if isinstance(values, dict | list | tuple):  # of any class of the user's
        return any(map(_any_meta, values.values() if isinstance(values, dict) else values))
    return _is_meta(values)


def _explanation(func: Callable[..., Any], error: Exception, is_whole: bool) -> str:
    advice = (
        "Pass include_buffers=False: buffers are then real, and only parameters have no values"
        if is_whole
        else "Compute the value from numbers, on the CPU, not from a parameter; or build this module outside the block"
    )
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
    return f"{_site()} called {name} on a tensor of the meta device, which has no values ({error}). {advice}"


def _site() -> str:
    """The constructors being run, outermost first, and the line of the innermost one."""
    names: list[str] = []
    seen: list[nn.Module] = []
    line = ""
    for frame in stack():
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if not line and not code.co_filename.startswith((_OWN, _TORCH)):
            line = f"{code.co_filename}:{frame.f_lineno}"
        if isinstance(module, nn.Module) and all(module is not other for other in seen):
            seen.append(module)
            names.append(type(module).__name__)
    return f"{' > '.join(reversed(names))} at {line}" if names else "code outside any module"


_OWN = __file__
_TORCH = str(Path(torch.__file__).parent)
# By name: libraries put wrappers of the same names in the place of torch.nn.init's functions.
_FILLERS = frozenset(
    """
    uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    orthogonal_ fill_ zero_ random_
    """.split()  # noqa: SIM905
)
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
# What may be asked of a stand-in without making it real: everything about it but its values.
_ATTRIBUTES = (
    "shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf", "grad", "grad_fn", "is_quantized", "is_sparse",
)  # fmt: skip
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex")
_DESCRIPTIONS = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES}
    | {getattr(torch.Tensor, name) for name in _METHODS}
    | {torch.is_floating_point, torch.is_complex}
)
