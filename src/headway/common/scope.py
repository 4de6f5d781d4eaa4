"""Registry of per-process singletons, so that modules hold no global state.

`scope.get_or_create(Listeners)` creates the object on first use and returns the same one afterwards. Objects that must end
with the process runtime are registered in the runtime's own scope instead (`process.current().scope`). Tests start
with `clear()`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Scope:
    """Container that holds at most one object per factory function or class."""

    def __init__(self) -> None:
        self._owned: dict[Callable[[], Any], Any] = {}

    def get_or_create(self, make: Callable[[], T]) -> T:
        """Return the object that `make` creates.

        `make` is called on first use. Later calls of `get_or_create` return the object that it created. There is no lock,
        because a fork could copy the lock while it is held. If two threads call `make` at the same time, one of the
        two objects is kept and returned to both.
        """
        found: T | None = self._owned.get(make)
        return self._owned.setdefault(make, make()) if found is None else found

    def has(self, make: Callable[[], Any]) -> bool:
        """Whether an object created by `make` exists."""
        return make in self._owned

    def drop(self, make: Callable[[], Any]) -> None:
        """Remove the object created by `make`. Do nothing if there is none."""
        self._owned.pop(make, None)

    def clear(self) -> None:
        """Remove all objects. For tests."""
        self._owned.clear()


_process = Scope()
get_or_create, has, drop, clear = _process.get_or_create, _process.has, _process.drop, _process.clear
