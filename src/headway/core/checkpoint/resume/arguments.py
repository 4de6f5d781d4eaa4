"""Check the arguments of `save_state`, `load_state` and `resume`.

Arguments that Accelerate's `save_state` and `load_state` pass on to DeepSpeed and other backends are accepted and
ignored.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from headway.core.config.values import suggest_word
from headway.core.runtime.device import is_device_type
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

CHANGED = ("data", "schedule", "groups")
"""Allowed values of the argument `changed`: parts of a run that may differ on purpose from the saved run."""


class _KnownArguments(NamedTuple):
    """Arguments that a method of the Accelerator accepts.

    Attributes:
        own: Names of the arguments that have an effect, separated by spaces.
        ignored: Names of the arguments of other backends, which have no effect.
        explanation: End of the message about an ignored argument.
    """

    own: str
    ignored: str
    explanation: str


_ARGUMENTS = {
    "save_state": _KnownArguments(
        "output_dir safe_serialization blocking metric weights",
        "client_state exclude_frozen_parameters max_shard_size save_function tag save_latest",
        "the checkpoint contains the full state",
    ),
    "load_state": _KnownArguments(
        "input_dir load_kwargs map_location strict changed",
        "load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only tag custom_load_fn mmap weights_only",
        "the full state is loaded",
    ),
}
"""Arguments by name of the method."""


def check_save_arguments(arguments: Mapping[str, Any]) -> None:
    """Log that extra arguments of `save_state` belong to other backends and have no effect.

    Args:
        arguments: Extra arguments by name.

    Raises:
        ConfigError: If no supported backend has an argument of this name.
    """
    for name in arguments:
        _check_argument_name("save_state", name)


def check_load_arguments(arguments: Mapping[str, Any]) -> None:
    """Log that extra arguments of `load_state` belong to other backends and have no effect.

    `map_location` has no effect either, but nothing is logged for it.

    Args:
        arguments: Extra arguments by name.

    Raises:
        ConfigError: If no supported backend has an argument of this name, or `map_location` is not None, "cpu",
            "on_device" or a device.
    """
    for name, value in arguments.items():
        if name != "map_location":
            _check_argument_name("load_state", name)
        elif value is not None and not _is_map_location(value if isinstance(value, str) else str(value)):
            raise ConfigError(
                f"load_state(map_location={value!r}); allowed: None, 'cpu', 'on_device' or a device. With any of them, "
                "each state goes to the device of its prepared object"
            )


def parse_changed(changed: str | Collection[str] | None) -> Collection[str] | None:
    """Return the argument `changed` as a collection of names, or None.

    Args:
        changed: One or several of "data", "schedule" and "groups", or None.

    Raises:
        ConfigError: If it contains another name.
    """
    names = (changed,) if isinstance(changed, str) else changed
    for name in names or ():
        if name not in CHANGED:
            raise ConfigError(f"changed={changed!r}; allowed: {', '.join(map(repr, CHANGED))}, or several of them")
    return names


def _is_map_location(text: str) -> bool:
    """Whether a text is a valid `map_location`: "cpu", "on_device", or a device such as "cuda:0"."""
    kind, colon, number = text.partition(":")
    return text in ("cpu", "on_device") or (is_device_type(kind) and (not colon or number.isdigit()))


def _check_argument_name(method: str, name: str) -> None:
    """Check that Accelerate's method has an argument, and log once that this argument has no effect here.

    Args:
        method: Name of the Accelerator's method.
        name: Name of the keyword argument.

    Raises:
        ConfigError: If the method has no such argument in Accelerate either.
    """
    arguments = _ARGUMENTS[method]
    if name not in arguments.ignored.split():
        allowed = [*arguments.own.split(), *arguments.ignored.split()]
        hint = suggest_word(name, allowed)
        raise ConfigError(f"{method}() has no argument {name!r}{hint or '; allowed: ' + ', '.join(allowed)}")
    log.info_once(
        "%s(%s=...) has no effect: it is for an engine that is not in use; %s", method, name, arguments.explanation
    )
