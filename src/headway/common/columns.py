"""Tables as text."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """A line for each row, its cells below those of the row above.

    Args:
        rows: as many cells each.
        align: "<" or ">": where cells stand in their columns.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    return ["  ".join(f"{cell:{align}{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
