"""Schedules whose length was computed from a prepared loader: a warning before the first update, and none for other lengths."""

import pytest

from tests.distributed.ranks import run_ranks
from tests.reports import schedule_runs

EVERY = (*schedule_runs.SCHEDULES, "transformers")
NATIVE, NAMED = "native", "accelerate"

WRONG = [
    *((name, "after", 3, NATIVE, {}) for name in EVERY),
    ("LinearLR", "after", 1, NATIVE, {}),
    ("LinearLR", "after", 1, NATIVE, {"gradient_accumulation_steps": 2}),
    ("LinearLR", "after", 3, NAMED, {}),
    ("transformers", "after", 3, NAMED, {}),
]

RIGHT = [
    *((name, count, 3, NATIVE, {}) for name in EVERY for count in ("before", "times", "together")),
    ("LinearLR", "before", 1, NATIVE, {}),
    ("LinearLR", "together", 4, NATIVE, {"gradient_accumulation_steps": 2}),
    ("LinearLR", "after", 3, NATIVE, {"scheduler_ticks": "updates"}),
    ("LinearLR", "after", 3, NATIVE, {"split_batches": True}),
    ("LinearLR", "times", 3, NAMED, {}),
    ("LinearLR", "together", 3, NAMED, {}),
    ("OneCycleLR", "steps=29", 3, NATIVE, {}),
]


def run(cases):
    return zip(cases, run_ranks(schedule_runs.train_each, 2, cases)[0])


def test_a_length_of_the_prepared_loader_is_warned_about_before_the_first_update():
    for (name, *rest), (at_prepare, every) in run(WRONG):
        assert len(at_prepare) == len(every) == 1, (name, rest, every)
        shown = "LambdaLR" if name == "transformers" else name
        assert at_prepare[0].removeprefix("[rank 0] ").startswith(f"{shown} ends after")
        assert "accelerator.num_processes" in at_prepare[0]


def test_other_lengths_are_not():
    for case, (at_prepare, every) in run(RIGHT):
        assert not at_prepare, case
        assert not every, case


@pytest.mark.parametrize("name", ["LinearLR", "OneCycleLR", "transformers"])
def test_a_length_that_fits_both_rules_is_warned_about_when_updates_go_on_at_zero(name):
    """Twice the epochs of the prepared loader are as many ticks as one epoch of two processes."""
    [(_, (at_prepare, every))] = run([(name, "after", 4, NATIVE, {})])
    assert not at_prepare
    assert len(every) == 1
    assert "training goes on with a learning rate of" in every[0]


def test_on_one_process_nothing_is_said():
    cases = [("LinearLR", count, 3, kind, {}) for count in ("after", "before") for kind in (NATIVE, NAMED)]
    assert run_ranks(schedule_runs.train_each, 1, cases)[0] == [([], [])] * len(cases)
