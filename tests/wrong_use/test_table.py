"""Every mistake of the table in every layout: equal to the loop by hand, an error, or one warning before the second update."""

import pytest

from tests.wrong_use.played import judge
from tests.wrong_use.table import PENDING, ROWS

CELLS = [
    pytest.param(
        name,
        layout,
        id=f"{name}-{layout}",
        marks=[pytest.mark.xfail(reason="fixed on another branch", strict=True)]
        if f"{name}-{layout}" in PENDING
        else [],
    )
    for name, row in ROWS.items()
    for layout in row.cells
]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_mistake_is_handled_as_the_table_says(name: str, layout: str) -> None:
    assert not judge(name, layout)
