"""Test that the fast examples in the table of docs/verify.md have the results that the page shows."""

import pytest

from headway.verify.proofs import PROOFS
from scripts import verify_table
from tests.verify.sessions import Verifier

FAST_COMMANDS = ("examples/by_feature/base.py", "examples/fsdp.py", "--as accelerate examples/as_accelerate.py")
TIMED = [word in ("data", "memory") for word in PROOFS]
"""Whether each proof measures the machine. Results of such a proof may differ from those on the page."""


def read_cells(line: str) -> list[str]:
    """Return the cells of a table row, without the proofs that measure the machine."""
    cells = line.rpartition("` |")[2].strip(" |").split(" | ")
    return [cell for cell, is_timed in zip(cells, TIMED, strict=True) if not is_timed]


@pytest.mark.matrix
@pytest.mark.parametrize("command", FAST_COMMANDS)
def test_page_shows_the_results_of_verify(verifier: Verifier, command: str) -> None:
    (row,) = (each for each in verify_table.ROWS if each.command == command)
    new_line = verify_table.format_row(row, verify_table.verify(row, verifier.servers, 240))
    page_line = verify_table.read_lines(verify_table.PAGE.read_text())[command]
    assert read_cells(new_line) == read_cells(page_line)
