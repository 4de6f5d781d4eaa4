"""Test `accelerator.verify`: invalid arguments are refused before any process starts, and the result is readable."""

from typing import Any

import pytest

from headway import Accelerator
from headway.errors import ConfigError
from headway.verify.in_notebook import FunctionProofs
from headway.verify.verdict import Proof


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("train",), {}, "give the function itself"),
        ((print, "abc"), {}, r"args=\('abc',\)"),
        ((print,), {"num_processes": 1}, "must be at least 2"),
        ((print,), {"only": ["resumes"]}, "'resumes' is not a proof; there are repeat, processes"),
        ((print,), {"skip": "resumes"}, "'resumes' is not a proof"),
        ((print,), {"strategy": "fsdq"}, "fsdq"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=message):
        accelerator.verify(*arguments, **options)


def test_result_contains_the_verdicts_by_word() -> None:
    passed = Proof("repeat", title="a run repeats itself").report_pass("4 updates, equal bit by bit")
    failed = Proof("memory", title="memory", page="memory.md").report_failure(
        "it grows", details=["by a lot"], advice="stop it"
    )
    assert FunctionProofs((passed,), 1.0).passed
    found = FunctionProofs((passed, failed), 1.0)
    assert not found.passed
    assert found.statuses == {"repeat": "PASS", "memory": "FAIL"}
    assert "-> stop it" in found.describe() == str(found)
    assert repr(found) == "<1 passed, 1 failed, 0 not checked in 1 s>"
