"""Registry of per-process singletons, so that modules hold no global state.

`scope.get_or_create(Listeners)` creates the object on first use and returns the same one afterwards. Objects that must end
with the process runtime are registered in the runtime's own scope instead (`process.current().scope`). Tests start
with `clear()`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Scope:
    """Container that holds at most one object per class or factory function."""

    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get_or_create(self, factory: Callable[[], T]) -> T:
        """Return the object that `factory` creates. `factory` is called only if this scope has no object of it yet.

        There is no lock, because a fork could copy the lock while it is held. If two threads call `factory` at the same
        time, one of the two objects is kept and returned to both.

        Args:
            factory: Class, or function without arguments. It also identifies the object in `has` and `drop`.
        """
        existing: T | None = self._objects.get(factory)
        if existing is not None:
            return existing
        created: T = self._objects.setdefault(factory, factory())
        return created

    def has(self, factory: Callable[[], Any]) -> bool:
        """Whether an object created by `factory` exists."""
        return factory in self._objects

    def drop(self, factory: Callable[[], Any]) -> None:
        """Remove the object created by `factory`. Do nothing if there is none."""
        self._objects.pop(factory, None)

    def clear(self) -> None:
        """Remove all objects. For tests."""
        self._objects.clear()


_process = Scope()
get_or_create, has, drop, clear = _process.get_or_create, _process.has, _process.drop, _process.clear
