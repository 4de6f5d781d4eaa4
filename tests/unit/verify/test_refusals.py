"""Test the reports of `headway verify` about scripts in which nothing can be checked."""

from dataclasses import replace

import pytest

from headway.verify.runs import VerifyError
from headway.verify.session import VerifyOptions, VerifySession
from headway.verify.verdict import describe_failure
from tests.unit.verify.made_records import make_record


def check(num_updates: int = 0, code: int | None = 0, num_backwards: int = 0, *, has_accelerator: bool = True) -> str:
    """Return the message about a run on one process."""
    baseline = make_record(num_updates, facts={"num_backwards": num_backwards}, code=0)
    baseline.code = code
    if not has_accelerator:
        baseline.facts_by_rank.clear()
    options = VerifyOptions({}, False, 2, "", 6, 60.0, ("repeat",))
    with VerifySession(options, lambda name: None) as session, pytest.raises(VerifyError) as exc_info:
        session._check_baseline(replace(baseline, seconds=68.0))
    return str(exc_info.value)


def set_load(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    # A test cannot wait for a particular load average of its machine.
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.mark.parametrize(("code", "has_accelerator"), [(70, True), (None, True), (None, False)])
def test_busy_machine_is_named_first(monkeypatch: pytest.MonkeyPatch, code: int | None, has_accelerator: bool) -> None:
    set_load(monkeypatch, 13.88)
    text = check(code=code, has_accelerator=has_accelerator)
    assert (
        "This machine is busy: load average 13.9 on 2 CPU cores. Wait until it is idle, or set --time_limit 300" in text
    )
    assert "smaller data" not in text.partition("busy")[0]
    set_load(monkeypatch, 1.9)
    text = check(code=code, has_accelerator=has_accelerator)
    assert "load average" not in text
    assert "--time_limit 300" in text


def test_proof_that_fails_by_time_names_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, 13.88)
    record = make_record(2, code=70)
    assert "load average 13.9 on 2 CPU cores (--time_limit" in describe_failure(record)
    set_load(monkeypatch, 0.5)
    assert "load" not in describe_failure(record)


@pytest.mark.parametrize("code", [0, 70])
def test_missing_step_is_named(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    set_load(monkeypatch, 0.5)
    text = check(code=code, num_backwards=64)
    assert "called accelerator.backward() 64 times, but no optimizer.step() of a prepared optimizer followed" in text
    assert "give arguments" not in text
    assert "smaller data" not in text
    assert "optimizer.step() of a prepared optimizer followed" not in check(code=code)
