"""Arguments that Accelerate's save_state and load_state pass on to engines: which ones are accepted without effect."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.config.values import did_you_mean
from headway.errors import ConfigError
from headway.log import get_logger
from headway.runtime.device import is_kind

log = get_logger(__name__)

CHANGED = ("data", "schedule")
"""What a run that is resumed may have others of, where it says so."""
_PLACES = (None, "cpu", "on_device")
_ARGUMENTS = {
    "save_state": (
        "output_dir safe_serialization blocking metric weights",
        "client_state exclude_frozen_parameters max_shard_size save_function tag save_latest",
        "the checkpoint holds the whole state",
    ),
    "load_state": (
        "input_dir load_kwargs map_location strict changed",
        "load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only tag custom_load_fn mmap weights_only",
        "the whole state is loaded",
    ),
}
"""By method: its own arguments, those of engines, and what happens whatever these say."""


def check_save_arguments(given: Mapping[str, Any]) -> None:
    """Take what has no meaning here with a line in the log.

    Raises:
        ConfigError: an argument that no engine takes.
    """
    for name in given:
        _take("save_state", name)


def check_load_arguments(given: Mapping[str, Any]) -> None:
    """The same for a load.

    Raises:
        ConfigError: an argument that no engine takes, or a place that is none.
    """
    for name, value in given.items():
        if name == "map_location":
            place = value if value is None or isinstance(value, str) else str(value)
            if place not in _PLACES and not _is_device(place):
                raise ConfigError(
                    f"load_state(map_location={value!r}); allowed: None, 'cpu', 'on_device' or a device. With any of them, "
                    "each state goes to the device of its prepared object"
                )
            continue
        _take("load_state", name)


def check_changed(given: str | Collection[str] | None) -> Collection[str] | None:
    """What is another one on purpose than when the checkpoint was saved, as a collection.

    Raises:
        ConfigError: something that is nothing of the kind.
    """
    meant = (given,) if isinstance(given, str) else given
    for name in meant or ():
        if name not in CHANGED:
            raise ConfigError(f"changed={given!r}; allowed: {', '.join(map(repr, CHANGED))}, or several of them")
    return meant


def _is_device(place: str) -> bool:
    return is_kind(place.partition(":")[0]) and (":" not in place or place.partition(":")[2].isdigit())


def _take(method: str, name: str) -> None:
    own, known, always = _ARGUMENTS[method]
    if name not in known.split():
        allowed = [*own.split(), *known.split()]
        hint = did_you_mean(name, allowed)
        raise ConfigError(f"{method}() has no argument {name!r}{hint or '; allowed: ' + ', '.join(allowed)}")
    log.info_once("%s(%s=...) has no effect: it is for an engine that is not in use; %s", method, name, always)
