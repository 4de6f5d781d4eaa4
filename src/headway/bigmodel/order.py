"""The order in which parts of a model are used, learnt while it runs."""

from collections.abc import Iterator, Sequence


class Order:
    """Predicts what is used next from what came after the last two uses.

    There are no passes to find: a decoding loop, an encoder called on its own, a module used twice and a change of mind
    are all the same to it. Until something was seen, the order of registration is the guess.
    """

    def __init__(self, num_units: int) -> None:
        self._after = {unit: (unit + 1) % num_units for unit in range(num_units)}
        self._after_pair: dict[tuple[int, int], int] = {}
        self._last: tuple[int, int] | None = None
        self._current: int | None = None

    def note(self, unit: int) -> None:
        """`unit` is used now."""
        if self._current is not None:
            self._after[self._current] = unit
            if self._last is not None:
                self._after_pair[self._last] = unit
            self._last = (self._current, unit)
        self._current = unit

    def ahead(self, after: Sequence[int] = ()) -> Iterator[int]:
        """What comes next, without end; `after`: what is already expected to come first."""
        recent = [unit for unit in (*(self._last or (self._current,)), *after[-2:]) if unit is not None][-2:]
        if not recent:
            return
        while True:
            unit = self._after_pair.get((recent[0], recent[-1])) if len(recent) == 2 else None
            if unit is None:
                unit = self._after[recent[-1]]
            yield unit
            recent = [recent[-1], unit]
