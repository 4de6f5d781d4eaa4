"""A row of the table: a mistake, and what is allowed to follow from it in each layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.wrong_use.script import Script, by_hand

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "tp": 2}
"""Layouts and their ranks."""


@dataclass(frozen=True)
class Cell:
    """What follows: "equal", or an "error" or "warning" with this part of what is said; not all errors are Headway's own."""

    kind: str
    text: str = ""
    is_ours: bool = True


EQUAL = Cell("equal")


def error(text: str) -> Cell:
    return Cell("error", text)


def plain_error(text: str) -> Cell:
    """One that is not Headway's, where it, or what the launcher says of it, is all that there is to say."""
    return Cell("error", text, is_ours=False)


def warning(text: str) -> Cell:
    return Cell("warning", text)


@dataclass(frozen=True)
class Row:
    """One mistake.

    Attributes:
        about: the mistake, for readers.
        make: makes it; returns what is compared, or None for the script's model.
        cells: what follows, by layout; a layout that is missing has no such mistake.
        by_hand: the same in plain PyTorch.
    """

    about: str
    make: Callable[[Script], Any]
    cells: dict[str, Cell]
    by_hand: Callable[[Script], Any] = by_hand

    @property
    def name(self) -> str:
        return self.make.__name__


@dataclass
class Section:
    """Rows of one kind; its `row` is the decorator that adds one."""

    title: str
    rows: list[Row] = field(default_factory=list)

    def row(
        self,
        about: str,
        everywhere: Cell | None = None,
        /,
        by_hand: Callable[[Script], Any] = by_hand,
        **cells: Cell | None,
    ) -> Callable[[Callable[[Script], Any]], Callable[[Script], Any]]:
        """A function that makes a mistake. `everywhere` holds for the layouts that are not named; None leaves one out."""

        def add(make: Callable[[Script], Any]) -> Callable[[Script], Any]:
            found = {layout: cells.get(layout, everywhere) for layout in LAYOUTS}
            self.rows.append(Row(about, make, {k: v for k, v in found.items() if v}, by_hand))
            return make

        return add
