"""A row of the table: a mistake, and its allowed results in each layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.wrong_use.script import Script, train_by_hand

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "tp": 2}
"""{layout: number of ranks}."""


@dataclass(frozen=True)
class Cell:
    """Expected result: "equal", or an "error" or a "warning" whose message contains `text`."""

    kind: str
    text: str = ""
    is_ours: bool = True


EQUAL = Cell("equal")


def error(text: str) -> Cell:
    return Cell("error", text)


def plain_error(text: str) -> Cell:
    """Return a cell for an error that is not Headway's own, but is sufficient, possibly with what the launcher adds to it."""
    return Cell("error", text, is_ours=False)


def warning(text: str) -> Cell:
    return Cell("warning", text)


@dataclass(frozen=True)
class Row:
    """A mistake and its expected results.

    Attributes:
        about: Description of the mistake, for the documentation.
        make: Makes the mistake. Returns the values to compare, or None to compare the script's model.
        cells: {layout: expected result}. A layout is missing if the mistake is impossible in it.
        by_hand: The equivalent in plain PyTorch.
    """

    about: str
    make: Callable[[Script], Any]
    cells: dict[str, Cell]
    by_hand: Callable[[Script], Any] = train_by_hand

    @property
    def name(self) -> str:
        return self.make.__name__


@dataclass
class Section:
    """Rows of one kind. Its method `row` is a decorator that adds a row."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def row(
        self,
        about: str,
        everywhere: Cell | None = None,
        /,
        by_hand: Callable[[Script], Any] = train_by_hand,
        **cells: Cell | None,
    ) -> Callable[[Callable[[Script], Any]], Callable[[Script], Any]]:
        """Return a decorator that adds a mistake. `everywhere` applies to layouts without a cell; None excludes a layout."""

        def add(make: Callable[[Script], Any]) -> Callable[[Script], Any]:
            found = {layout: cells.get(layout, everywhere) for layout in LAYOUTS}
            self.rows.append(Row(about, make, {k: v for k, v in found.items() if v}, by_hand))
            return make

        return add
