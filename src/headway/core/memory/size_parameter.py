"""Checks of the function that `find_executable_batch_size` decorates, whose first parameter is the batch size."""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from headway.errors import CallError, ConfigError

STEPS = "gradient_accumulation_steps"
"""Name of the parameter through which the function gets the number of accumulation steps with
`keep_global_batch=True`.
"""

_IS_DEFERRED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
"""Tests for kinds of functions whose body does not run during the call."""

POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
"""Kinds of parameters that a positional argument can fill."""


def put_size_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that its first parameter is the batch size and its second one is `self`."""

    @functools.wraps(method)
    def call_method(size: int, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return method(owner, size, *args, **kwargs)

    signature = inspect.signature(method)
    owner, *rest = signature.parameters.values()
    call_method.__signature__ = signature.replace(parameters=[*rest[:1], owner, *rest[1:]] if rest else [])  # type: ignore[attr-defined]
    return call_method


def check_parameters(function: Callable[..., Any], parameters: list[Parameter], needs_steps: bool) -> None:
    """Check that a function can be called with a batch size, and with a number of steps if `needs_steps`.

    Args:
        function: Function to decorate. For a method, `put_size_first` has wrapped it.
        parameters: Parameters of the function.
        needs_steps: Whether the function is also called with a number of accumulation steps.

    Raises:
        ConfigError: If a parameter is missing, or the function is a generator or a coroutine.
    """
    name = get_function_name(function)
    if not parameters or parameters[0].kind not in POSITIONAL_KINDS:
        raise ConfigError(f"{name} has no first parameter for the batch size; write `def {name}(batch_size, ...)`")
    if any(is_deferred(function) for is_deferred in _IS_DEFERRED):
        raise ConfigError(
            f"{name} is a generator or a coroutine, whose body runs only after the call has returned. If it runs out of "
            "memory, it cannot be retried with a smaller size. Decorate a plain function"
        )
    takes_steps = any(each.name == STEPS or each.kind is Parameter.VAR_KEYWORD for each in parameters)
    if needs_steps and not takes_steps:
        raise ConfigError(
            f"with keep_global_batch=True {name} is given {STEPS}=...; add it, and pass it to the Accelerator"
        )


def check_call(
    name: str,
    signature: inspect.Signature,
    source_signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise an error if the caller's arguments, together with a batch size, do not fit the signature of the function.

    Args:
        name: Name of the function.
        signature: Signature with the batch size as first parameter.
        source_signature: Signature in the source. For a method, its first parameter is `self`.
        args: Positional arguments of the call, without the batch size.
        kwargs: Keyword arguments of the call.

    Raises:
        CallError: If the arguments do not fit. If they would fit without the batch size that the decorator adds, the
            message shows the correct call.
    """
    try:
        signature.bind(0, *args, **kwargs)
        return
    except TypeError as error:
        try:
            source_signature.bind(*args, **kwargs)
        except TypeError:
            raise CallError(f"{name}(batch_size, ...) cannot be called with these arguments: {error}") from None
    size_name = next(iter(signature.parameters))
    num_owners = int(size_name != next(iter(source_signature.parameters)))  # 1 for a method, whose `self` is in `args`
    num_sizes = int(size_name not in kwargs)  # 1 if the batch size is in `args`
    other_args = [repr(each) for each in args[num_owners + num_sizes :]]
    other_kwargs = [f"{key}={value!r}" for key, value in kwargs.items() if key not in (size_name, STEPS)]
    raise CallError(
        f"Batch size was passed into `{name}` as the first argument when called, but its parameter {size_name!r} is filled in by "
        f"find_executable_batch_size; call it without: {name}({', '.join([*other_args, *other_kwargs])})"
    )


def get_function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of its class if it has none, for messages."""
    return getattr(function, "__name__", type(function).__name__)
