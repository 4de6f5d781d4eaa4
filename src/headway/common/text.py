"""Names in messages, and tables as text."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def columns(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """A line for each row, its cells below those of the row above.

    Args:
        rows: as many cells each.
        align: "<" or ">": where cells stand in their columns.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    return ["  ".join(f"{cell:{align}{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
