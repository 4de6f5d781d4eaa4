"""The table: all mistakes, by the kind of thing that they are made with."""

from tests.wrong_use import loading, losses, models, one_rank, preparing, saving, the_loop

SECTIONS = [
    the_loop.section,
    losses.section,
    preparing.section,
    models.section,
    loading.section,
    one_rank.section,
    saving.section,
]
ROWS = {row.name: row for section in SECTIONS for row in section.rows}


def cells(name: str, *layouts: str) -> list[str]:
    """The row's cells in these layouts, or in all."""
    return [f"{name}-{layout}" for layout in layouts or ROWS[name].cells]


PENDING: set[str] = set()
"""Cells that are mended on another branch."""
