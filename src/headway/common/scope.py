"""What there is once in a process, held by one object: no module keeps state of its own.

A part asks for its own by what makes it, e.g. `scope.own(Listeners)`: made on first use, the same one afterwards. What ends
with the process runtime hangs on the runtime's own scope instead (`process.current().scope`). Tests begin with `clear()`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Scope:
    """A holder of one object for each maker."""

    def __init__(self) -> None:
        self._owned: dict[Callable[[], Any], Any] = {}

    def own(self, make: Callable[[], T]) -> T:
        """What `make` made here, on first use.

        No lock, which a fork could copy while it is held: where two threads come first, one of the two objects is kept.
        """
        found: T | None = self._owned.get(make)
        return self._owned.setdefault(make, make()) if found is None else found

    def has(self, make: Callable[[], Any]) -> bool:
        """Has `make` been asked for already?"""
        return make in self._owned

    def drop(self, make: Callable[[], Any]) -> None:
        """Forget what `make` made."""
        self._owned.pop(make, None)

    def clear(self) -> None:
        """Forget everything: for tests."""
        self._owned.clear()


_process = Scope()
own, has, drop, clear = _process.own, _process.has, _process.drop, _process.clear
