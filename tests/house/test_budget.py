"""The house has a budget of lines: one person can hold only so much in mind."""

from scripts import lines

BUDGET = 55_491
"""Lines of code in src, without docstrings, comments and blanks; whoever raises this says why in DECISIONS.md."""


def test_the_house_keeps_its_budget() -> None:
    assert sum(lines.rooms().values()) <= BUDGET


def test_what_is_counted() -> None:
    text = '"""A module."""\n\n# a comment\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Says."""\n    return x\n'
    assert lines.count(text) == 3 + 2
