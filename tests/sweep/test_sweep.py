"""One minute of the sweeps, with fixed cases. `make sweep` takes an hour."""

import signal
import subprocess
import sys

import pytest

from tests.distributed.test_kill_sweep import _find_skip_reason
from tests.sweep import failed_calls, jobs, modes, runs

SEED = 7

CHOSEN = {
    "two loaders in turn": runs.make_plan(SEED, 30),
    # Strikes directly at marks: a delay that was measured in an uninterrupted run may be longer than the rest of this run.
    "workers on two processes": runs.Plan(
        1001,
        "workers",
        2,
        (
            jobs.Strike("saving", 0.23, 0.0, signal.SIGINT, "rank 0"),
            jobs.Strike("between epochs", 0.28, 0.0, signal.SIGUSR1, "rank 1"),
        ),
    ),
    # Killed twice while each rank writes its part in the background.
    "a sharded model, saved behind the loop": runs.Plan(
        1002,
        "fsdp behind",
        2,
        (
            jobs.Strike("saving", 0.4, 0.5, signal.SIGKILL, "rank 1"),
            jobs.Strike("saving", 0.7, 0.2, signal.SIGTERM, "launcher"),
        ),
    ),
    # The same in a pipeline, with the first kill on the last stage.
    "stages with shards, saved behind the loop": runs.Plan(
        1003,
        "pp+fsdp behind",
        4,
        (
            jobs.Strike("saving", 0.4, 0.5, signal.SIGKILL, "rank 3"),
            jobs.Strike("saving", 0.7, 0.2, signal.SIGTERM, "launcher"),
        ),
    ),
    # The evaluation runs again before the loop, which has no epoch left.
    "a Trainer in its last evaluation": runs.Plan(
        1000, "trainer", 1, (jobs.Strike("evaluation", 0.99, 0.0, signal.SIGTERM, "launcher"),)
    ),
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return runs.Sweep(tmp_path_factory.mktemp("sweep"))


@pytest.mark.skipif(sys.platform != "linux", reason="processes of a job are found by /proc")
@pytest.mark.parametrize("chosen", CHOSEN)
def test_repeatedly_interrupted_run_matches_uninterrupted_run(chosen, sweep):
    outcome = sweep.run(CHOSEN[chosen])
    assert outcome.problems == []
    assert len(outcome.codes) > 1
    assert any(outcome.struck)


@pytest.mark.skipif(bool(_find_skip_reason()), reason=_find_skip_reason())
def test_failed_call_loses_nothing(tmp_path):
    """Run the sweep in a new process, because each of its cases is a fork of it."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.sweep.failed_calls", "--seed", str(SEED), "--count", "25"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert int(result.stdout.split()[-2]) > 15


def test_plan_of_a_run_depends_only_on_seed_and_number():
    assert runs.make_plan(SEED, 31) == runs.make_plan(SEED, 31)
    assert runs.make_plan(SEED, 31) != runs.make_plan(SEED + 1, 31)
    planned = [runs.make_plan(SEED, number) for number in range(200)]
    assert {(each.mode, each.num_ranks) for each in planned} == {
        (name, n) for name, mode in modes.MODES.items() for n in mode.num_ranks
    }
    strikes = [strike for each in planned for strike in each.strikes]
    assert {strike.number for strike in strikes} == set(runs.SIGNALS)
    assert {strike.phase for strike in strikes} == set(runs.PHASES)
    assert {strike.target for strike in strikes} == {"rank 0", "rank 1", "rank 2", "launcher", "all"}
    spread = [runs.make_plan(SEED, number, modes.SHARDED) for number in range(60)]
    assert {(each.mode, each.num_ranks) for each in spread} == {
        (name, mode.num_ranks[0]) for name, mode in modes.SHARDED.items()
    }
    assert {strike.target for each in spread for strike in each.strikes} >= {"rank 3", "launcher", "all"}


def line(place, loss="0x1p0"):
    return {"place": place, "loss": loss}


WHOLE = [line(0), line(1), line(2), {"evaluation": "0x1p0"}]


@pytest.mark.parametrize(
    ("lines", "reached", "former", "code", "expected"),
    [
        (WHOLE, 0, None, 0, ""), (WHOLE[:2], 0, None, -9, ""), (WHOLE[1:], 2, (-9, 2), 0, ""), (WHOLE[2:], 2, (75, 2), 0, ""),
        (WHOLE[3:], 4, (75, 4), 0, ""), (WHOLE[1:], 3, (75, 1), 0, ""),
        (WHOLE[:3], 0, None, 0, "ended with 0 after"), (WHOLE[2:], 1, (-9, 1), 0, "begins with"),
        ([line(0), line(1, "0x1p1")], 0, None, -9, "instead of"), ([line(0, "0x1p1")], 0, None, -9, "begins with"),
        (WHOLE[1:], 2, (75, 2), 0, "again"), ([line(0), line(2)], 0, None, -9, "instead of"),
        ([*WHOLE, line(9)], 0, None, -9, "more lines"),
    ],
)  # fmt: skip
def test_violated_promises_are_found(lines, reached, former, code, expected):
    def ended(lines, code):
        return jobs.Ended(code, 1.0, [], [lines], "")

    before = None if former is None else ended(WHOLE[: former[1]], former[0])
    found = runs._find_problems(ended(lines, code), ended(WHOLE, 0), [reached], before)
    assert (expected in found[0]) if expected else found == []


def test_answer_of_a_failed_save_is_compared_with_the_checkpoint(tmp_path):
    variant = failed_calls.VARIANTS["blocking"]
    failed_calls.save(tmp_path, 1, variant)
    assert failed_calls._judge(tmp_path, variant, ["refused: the disk is full"]) == []
    assert failed_calls._judge(tmp_path, variant, ["saved"]) == ["said to be saved, and 1 is loaded"]
    assert failed_calls._judge(tmp_path, variant, ["hangs"]) == ["not an answer: hangs"]
    failed_calls.save(tmp_path, 2, variant)
    assert failed_calls._judge(tmp_path, variant, ["refused: so"]) == ["said not to be saved, and 2 is loaded"]
    assert failed_calls._judge_later(tmp_path, variant, ["saved"])
