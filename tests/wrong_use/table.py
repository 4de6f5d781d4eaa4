"""The table of all mistakes, grouped by topic."""

from tests.wrong_use import (
    language_data,
    loading,
    losses,
    models,
    one_rank,
    precision,
    preparing,
    saving,
    schedules,
    settings,
    several,
    the_loop,
)

FILES = (
    the_loop,
    losses,
    preparing,
    models,
    several,
    loading,
    language_data,
    schedules,
    precision,
    one_rank,
    saving,
    settings,
)
SECTIONS = [file.section for file in FILES]
ROWS = {row.name: row for section in SECTIONS for row in section.rows}


def list_cells(name: str, *layouts: str) -> list[str]:
    """Return the test IDs of the row's cells in these layouts, or in all layouts."""
    return [f"{name}-{layout}" for layout in layouts or ROWS[name].cells]


PENDING: set[str] = set()
"""Cells that fail until a fix from another branch is merged."""
