"""Cheap rows of the table of examples in docs/verify.md are as the page says."""

import pytest

from headway.verify.proofs import PROOFS
from scripts import verify_table
from tests.verify.sessions import Verifier

CHEAP = ("examples/by_feature/base.py", "examples/fsdp.py", "--as accelerate examples/as_accelerate.py")
TIMED = [word in ("data", "memory") for word in PROOFS]
"""Whether a proof measures this machine. Its result may differ from that of the page."""


def read_cells(line: str) -> list[str]:
    """Return the cells of a line whose proofs do not measure the machine."""
    cells = line.rpartition("` |")[2].strip(" |").split(" | ")
    return [cell for cell, is_timed in zip(cells, TIMED, strict=True) if not is_timed]


@pytest.mark.matrix
@pytest.mark.parametrize("command", CHEAP)
def test_the_page_shows_what_verify_finds(verifier: Verifier, command: str) -> None:
    (row,) = (each for each in verify_table.ROWS if each.command == command)
    found = verify_table.format_row(row, verify_table.verify(row, verifier.servers, 240))
    written = verify_table.read_lines(verify_table.PAGE.read_text())[command]
    assert read_cells(found) == read_cells(written)
