"""Test the exit codes of `headway verify`."""

import pytest

from headway.verify.command import choose_code
from headway.verify.verdict import Status, Verdict


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("PASS", "NOT CHECKED"), 0),
        (("PASS", "FAIL", "NOT CHECKED"), 1),
        (("FAIL", "NOT CHECKED"), 1),
        (("NOT CHECKED", "NOT CHECKED"), 2),
    ],
)
def test_exit_code(statuses: tuple[Status, ...], code: int) -> None:
    assert choose_code([Verdict(key="memory", title="memory", status=status, reason="") for status in statuses]) == code
