"""Typed access to environment variables, and the names of those between the launcher and its workers.

No other module touches `os.environ`. Variables that are settings follow from the fields of `LaunchConfig`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.errors import ConfigError

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})

PREFIX = "HEADWAY_"
"""Start of the names of all environment variables that belong to Headway."""

CONTROL = "HEADWAY_CONTROL"
"""Variable that gives a worker the address of the control plane hosted by the launcher."""

RESTART_REASON = "HEADWAY_RESTART_REASON"
"""Variable that contains the reason why the launcher restarted the workers, as one sentence."""

SECRET = "HEADWAY_SECRET"
"""Variable for the run's shared secret, with which its machines and ranks authenticate each other. It is optional."""

MEMORY = "HEADWAY_MEMORY"
"""Variable that gives a worker the path of a folder in shared memory.

The launcher's agent creates and removes the folder.
"""

VERIFY = "HEADWAY_VERIFY"
"""Variable that `headway verify` sets. Its JSON text describes the values that the workers of a run must record."""

PAYLOAD = "HEADWAY_RUN"
"""Variable that carries the launcher's settings to a worker, as JSON."""


def get(name: str) -> str | None:
    """Return the text of an environment variable, or None if it is not set."""
    return os.environ.get(name)


def remove_variable(name: str) -> str | None:
    """Remove an environment variable, so that child processes do not inherit it. Return its text, or None if unset."""
    return os.environ.pop(name, None)


def get_int(name: str) -> int | None:
    """Return an environment variable as an integer, or None if it is unset or empty.

    Raises:
        ConfigError: If the value is not an integer.
    """
    text = os.environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={text!r} must be an integer; correct or unset it") from None


def get_bool(name: str) -> bool | None:
    """Return an environment variable as a bool, or None if it is not set.

    Raises:
        ConfigError: If the value is not one of the accepted words for true and false.
    """
    text = os.environ.get(name)
    return None if text is None else parse_bool(text, name)


def parse_bool(text: str, name: str) -> bool:
    """Parse "true", "no", "1" and similar words, ignoring case. Empty text means False.

    Args:
        text: Text to parse.
        name: Name of the variable or setting, for the error message.

    Raises:
        ConfigError: If the text is not one of the accepted words.
    """
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(f"{name}={text!r} must be a truth value: one of true, false, yes, no, on, off, 1, 0")


def get_rank() -> int:
    """Return this process's global rank as set by the launcher, or 0 without a launcher."""
    return get_int("RANK") or 0


def get_local_rank() -> int:
    """Return this process's rank on its machine as set by the launcher, or 0 without a launcher."""
    return get_int("LOCAL_RANK") or 0


def get_world_size() -> int:
    """Return the total number of processes as set by the launcher, or 1 without a launcher."""
    return get_int("WORLD_SIZE") or 1


def get_local_world_size() -> int:
    """Return the number of processes on this machine as set by the launcher, or 1 without a launcher."""
    return get_int("LOCAL_WORLD_SIZE") or 1


def copy_variables() -> dict[str, str]:
    """Return a copy of the environment variables, for starting another process."""
    return dict(os.environ)


def set_default(name: str, value: str) -> None:
    """Set an environment variable for this process and its children, unless it is already set."""
    os.environ.setdefault(name, value)


@contextmanager
def patch_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Return a context in which environment variables are changed. The previous values are restored at its end.

    Args:
        changes: New values by name. A value of None removes the variable.
    """
    previous = {name: os.environ.get(name) for name in changes}
    apply_changes(changes)
    try:
        yield
    finally:
        apply_changes(previous)


@contextmanager
def clear_variables() -> Iterator[None]:
    """Return a context in which no environment variables are set. The previous environment is restored at its end."""
    previous = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


def apply_changes(changes: Mapping[str, str | None]) -> None:
    """Change environment variables of this process and of processes that it starts later.

    Args:
        changes: New values by name. A value of None removes the variable.
    """
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
