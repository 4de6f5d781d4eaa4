"""The only file that touches os.environ: typed reads of the variables that launchers set."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.errors import ConfigError

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", ""})

PREFIX = "HEADWAY_"
CONTROL = "HEADWAY_CONTROL"
"""Name of the variable that tells a worker where the launcher hosts the control plane."""

SECRET = "HEADWAY_SECRET"
"""Name of the variable that may hold the secret by which a run's machines and ranks know one another."""

MEMORY = "HEADWAY_MEMORY"
"""Name of the variable that tells a worker of a folder in shared memory, which the launcher's agent holds."""

PAYLOAD = "HEADWAY_RUN"
"""Name of the variable that carries the launcher's JSON payload to a worker."""


def get(name: str) -> str | None:
    """Return the variable's text, or None where it is not set."""
    return os.environ.get(name)


def take(name: str) -> str | None:
    """Return the variable's text and remove it, so that no child process finds it; None where it is not set."""
    return os.environ.pop(name, None)


def get_int(name: str) -> int | None:
    """Return the variable as an integer, or None where it is unset or empty.

    Raises:
        ConfigError: the variable is set to something that is not an integer.
    """
    text = os.environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={text!r} must be an integer; correct or unset it") from None


def get_bool(name: str) -> bool | None:
    """Return the variable as a truth value, or None where it is not set.

    Raises:
        ConfigError: the variable is set to something that is neither true nor false.
    """
    text = os.environ.get(name)
    return None if text is None else parse_bool(text, name)


def parse_bool(text: str, name: str) -> bool:
    """Read 'true', 'no', '1', ... ; `name` is what the error calls it."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(f"{name}={text!r} must be a truth value: one of true, false, yes, no, on, off, 1, 0")


def rank() -> int:
    """This process's rank as its launcher set it; 0 without a launcher."""
    return get_int("RANK") or 0


def local_rank() -> int:
    """This process's rank among those of its machine; 0 without a launcher."""
    return get_int("LOCAL_RANK") or 0


def world_size() -> int:
    """The number of processes that the launcher started; 1 without one."""
    return get_int("WORLD_SIZE") or 1


def local_world_size() -> int:
    """The number of processes on this machine; 1 without a launcher."""
    return get_int("LOCAL_WORLD_SIZE") or 1


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to start another process with."""
    return dict(os.environ)


def set_default(name: str, value: str) -> None:
    """Set a variable for this process and its children unless the user has set it."""
    os.environ.setdefault(name, value)


@contextmanager
def patched(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Apply `changes` (None removes a variable) for the block, and put the former values back after it."""
    before = {name: os.environ.get(name) for name in changes}
    change(changes)
    try:
        yield
    finally:
        change(before)


@contextmanager
def cleared() -> Iterator[None]:
    """Run the block in an empty environment, and put the former one back after it."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def change(changes: Mapping[str, str | None]) -> None:
    """Apply `changes` for this process and its children; None removes a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
