"""Tests of schedules with a length computed from a prepared loader: a warning before the first update, none for other lengths."""

import pytest

from tests.distributed.ranks import run_ranks
from tests.reports import schedule_runs

ALL_SCHEDULES = (*schedule_runs.SCHEDULES, "transformers")
NATIVE, ACCELERATE = "native", "accelerate"

WRONG = [
    *((name, "after", 3, NATIVE, {}) for name in ALL_SCHEDULES),
    ("LinearLR", "after", 1, NATIVE, {}),
    ("LinearLR", "after", 1, NATIVE, {"gradient_accumulation_steps": 2}),
    ("LinearLR", "after", 3, ACCELERATE, {}),
    ("transformers", "after", 3, ACCELERATE, {}),
]

RIGHT = [
    *((name, count, 3, NATIVE, {}) for name in ALL_SCHEDULES for count in ("before", "times", "together")),
    ("LinearLR", "before", 1, NATIVE, {}),
    ("LinearLR", "together", 4, NATIVE, {"gradient_accumulation_steps": 2}),
    ("LinearLR", "after", 3, NATIVE, {"scheduler_ticks": "updates"}),
    ("LinearLR", "after", 3, NATIVE, {"split_batches": True}),
    ("LinearLR", "times", 3, ACCELERATE, {}),
    ("LinearLR", "together", 3, ACCELERATE, {}),
    ("OneCycleLR", "steps=29", 3, NATIVE, {}),
]


def run_cases(cases):
    return zip(cases, run_ranks(schedule_runs.train_each, 2, cases)[0])


def test_length_of_the_prepared_loader_warns_before_the_first_update():
    for (name, *rest), (warnings_at_prepare, all_warnings) in run_cases(WRONG):
        assert len(warnings_at_prepare) == len(all_warnings) == 1, (name, rest, all_warnings)
        shown_name = "LambdaLR" if name == "transformers" else name
        assert warnings_at_prepare[0].removeprefix("[rank 0] ").startswith(f"{shown_name} ends after")
        assert "accelerator.num_data_shards" in warnings_at_prepare[0]


def test_other_lengths_give_no_warning():
    for case, (warnings_at_prepare, all_warnings) in run_cases(RIGHT):
        assert not warnings_at_prepare, case
        assert not all_warnings, case


@pytest.mark.parametrize("name", ["LinearLR", "OneCycleLR", "transformers"])
def test_ambiguous_length_warns_when_updates_continue_at_the_final_rate(name):
    """Two epochs of the prepared loader have as many batches as one epoch has ticks on two processes."""
    [(_, (warnings_at_prepare, all_warnings))] = run_cases([(name, "after", 4, NATIVE, {})])
    assert not warnings_at_prepare
    assert len(all_warnings) == 1
    assert "training continues with a learning rate of" in all_warnings[0]


def test_one_process_gives_no_warning():
    cases = [("LinearLR", count, 3, kind, {}) for count in ("after", "before") for kind in (NATIVE, ACCELERATE)]
    assert run_ranks(schedule_runs.train_each, 1, cases)[0] == [([], [])] * len(cases)
