"""Test the scripts that make the table of examples and the picture of a terminal."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from headway.verify.proofs import PROOFS
from headway.verify.verdict import Verdict
from scripts import terminal_picture, verify_table

ROOT = Path(__file__).parents[3]


def test_every_row_of_the_table_is_a_script_of_this_repository() -> None:
    for row in verify_table.ROWS:
        assert (ROOT / row.script).is_file(), row


def test_page_has_a_line_for_every_row() -> None:
    lines = verify_table.read_lines(verify_table.PAGE.read_text())
    assert list(lines) == [row.command for row in verify_table.ROWS]
    for line in lines.values():
        assert line.count("|") == len(PROOFS) + 2, line
        assert "?" not in line.rpartition("` |")[2], line


def test_row_shows_its_verdicts() -> None:
    statuses = ["PASS", "FAIL", *["NOT CHECKED"] * (len(PROOFS) - 2)]
    verdicts = [
        Verdict(key=word, title=word, status=status, reason="") for word, status in zip(PROOFS, statuses, strict=True)
    ]  # type: ignore[arg-type]
    row = verify_table.Row("train.py", ("--as", "accelerate"), ("--lr", "1"))
    line = verify_table.format_row(row, verify_table.Result(verdicts, "", 3.0))
    assert line == f"| `--as accelerate train.py --lr 1` | pass | **fail** {'| - ' * (len(PROOFS) - 2)}|"


@pytest.mark.parametrize("line", ["\033[32mPASS\033[0m  a < b & c", "plain", ""])
def test_picture_is_valid_and_contains_the_text(line: str) -> None:
    text = terminal_picture.draw("$ headway verify", [line, "longer than the others"])
    found = ElementTree.fromstring(text)
    shown = ["".join(each.itertext()) for each in found.iter("{http://www.w3.org/2000/svg}text")]
    assert shown == [line.replace("\033[32m", "").replace("\033[0m", ""), "longer than the others"]


def test_colors_become_spans() -> None:
    text = terminal_picture.draw("title", ["\033[31mFAIL\033[0m memory"])
    assert f'<tspan fill="{terminal_picture.COLORS["31"]}">FAIL</tspan> memory' in text


def test_command_is_run_in_a_terminal(tmp_path: Path) -> None:
    assert terminal_picture.run_command(["test", "-t", "1"], str(tmp_path)) == ""
    assert terminal_picture.run_command(["sh", "-c", "test -t 1 && pwd"], str(tmp_path)).strip() == str(tmp_path)
