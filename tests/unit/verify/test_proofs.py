"""Test verdicts on records built by hand: each fault is found and named, and equal runs pass."""

import math
from dataclasses import replace

import pytest

from headway.cli.verify import PROOFS as WORDS
from headway.verify.proofs import PROOFS
from headway.verify.verdict import RunSet
from tests.unit.verify.made_records import NAMES, make_record, make_update


def make_runs(**changes) -> RunSet:
    """Return correct runs, apart from the changes."""
    baseline = make_record()
    given = {
        "repeat": make_record(),
        "reference": baseline,
        "several": make_record(num_ranks=2),
        "reordered": make_record(noise=1e-7),
    }
    return RunSet(**{"baseline": baseline, **given, **changes})


def test_command_line_knows_every_proof():
    assert tuple(PROOFS) == WORDS


@pytest.mark.parametrize("word", ["repeat", "processes", "samples", "learning"])
def test_equal_runs_pass(word):
    verdict = PROOFS[word](make_runs())
    assert verdict.status == "PASS", verdict


def test_rounding_differences_pass():
    verdict = PROOFS["processes"](make_runs(several=make_record(num_ranks=2, noise=1e-6)))
    assert verdict.status == "PASS", verdict


def test_gradients_that_are_twice_as_large_are_named():
    verdict = PROOFS["processes"](make_runs(several=make_record(num_ranks=2, scale=2.0)))
    assert verdict.status == "FAIL"
    assert "all gradients are 2 times those of one process" in verdict.reason
    assert "update 1" in verdict.details[0]


def test_first_parameter_that_differs_is_named():
    several = make_record(num_ranks=2)
    several.gradients(3)
    several.__dict__["_arrays_by_update"][3]["g:last.weight"] *= 1.5
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.status == "FAIL"
    assert "first parameter: last.weight" in verdict.details
    assert "update 3" in verdict.details[0]


def test_batch_norm_without_synchronization_is_the_cause():
    several = make_record(num_ranks=2, noise=0.1, facts={"batch_norms": ["1"]})
    assert "BatchNorm" in PROOFS["processes"](make_runs(several=several)).reason


def test_random_numbers_of_each_rank_are_not_checked():
    several = make_record(num_ranks=2, noise=0.1, facts={"unshared_draw_lines": {"train.py:3": "multinomial"}})
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.status == "NOT CHECKED"
    assert "multinomial() at train.py:3" in verdict.reason


def test_learning_rate_that_differs_is_named():
    several = make_record(num_ranks=2, changes={1: {"learning_rates": [0.2]}})
    for name in NAMES:
        several.__dict__["_arrays_by_update"][1][f"p:{name}"] += 0.5
    assert "the learning rate is 0.2, and 0.1 on one process" in PROOFS["processes"](make_runs(several=several)).reason


def test_replicas_that_differ_are_named():
    several = make_record(num_ranks=2)
    several.updates_by_rank[1][2].parameter_hashes["first.bias"] = "other"
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.reason == "update 2: first.bias differs between rank 0 and rank 1"


def test_failed_run_shows_its_error():
    several = make_record(num_updates=0, num_ranks=2, code=1)
    several.output = "Traceback (most recent call last):\nRuntimeError: shapes differ"
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.status == "FAIL"
    assert "RuntimeError: shapes differ" in verdict.reason


# -------------------------------------------------------------------- samples


def test_ranks_with_the_same_samples_fail():
    several = make_record(num_ranks=2)
    for updates in several.updates_by_rank:
        for number in updates:
            updates[number] = make_update(number, tuple(f"row {8 * number + each}" for each in range(8)))
    verdict = PROOFS["samples"](make_runs(several=several))
    assert verdict.status == "FAIL"
    assert "all 2 ranks trained on the same 8 samples" in verdict.reason


def test_missing_and_repeated_samples_are_counted():
    several = make_record(num_ranks=2)
    several.updates_by_rank[1][2].batches[0]["row_hashes"][0] = "row 8"
    several.updates_by_rank[1][2].batches[0]["unpadded_hashes"][0] = "row 8"
    verdict = PROOFS["samples"](make_runs(several=several))
    assert verdict.status == "FAIL"
    assert "1 samples are missing and 1 are others or repeated" in verdict.reason
    assert "first in update 2" in verdict.details


@pytest.mark.parametrize("empty", [(), (1,), (1, 2)])
def test_workers_that_yield_the_whole_stream_are_found_after_updates_without_batches(empty):
    def make_batches(number):
        each = {"loader": 0, "row_hashes": [f"row {number}"], "unpadded_hashes": [f"row {number}"], "indices": []}
        return {"batches": [] if number in empty else [each, each]}

    facts = {"loaders": {"0": {"workers": 2, "dataset": "Stream", "line": "train.py:9"}}}
    baseline = make_record(facts=facts, changes={number: make_batches(number) for number in range(1, 5)})
    verdict = PROOFS["samples"](make_runs(baseline=baseline))
    assert verdict.status == "FAIL"
    assert "each of 2 workers yields the whole stream Stream" in verdict.reason


def test_samples_with_other_padding_pass():
    several = make_record(num_ranks=2)
    for updates in several.updates_by_rank:
        for update in updates.values():
            update.batches[0]["row_hashes"] = [f"padded {row}" for row in update.batches[0]["row_hashes"]]
    assert PROOFS["samples"](make_runs(several=several)).status == "PASS"


# -------------------------------------------------------------------- repeats and resumes


def test_numbers_that_are_nan_in_both_runs_are_equal():
    # Each record has NaN objects of its own, as records that are read from files do.
    baseline, again, resumed = (
        {3: {"losses": [float("nan")], "gradient_norms": dict.fromkeys(NAMES, float("nan"))}} for _ in range(3)
    )
    runs = make_runs(baseline=make_record(changes=baseline), repeat=make_record(changes=again))
    assert PROOFS["repeat"](runs).status == "PASS"
    runs = make_resumed(changes=resumed)
    runs.baseline = make_record(changes=baseline)
    assert PROOFS["resume"](runs).status == "PASS"


def test_unseeded_generator_is_named():
    repeat = make_record(facts={"generator_hashes": {"torch": "a", "random": "c"}}, changes={1: {"losses": [7.0]}})
    baseline = make_record(facts={"generator_hashes": {"torch": "a", "random": "b"}})
    verdict = PROOFS["repeat"](make_runs(baseline=baseline, repeat=repeat))
    assert verdict.status == "FAIL"
    assert "the generator of random starts from another seed in each run" in verdict.details


def make_resumed(**changes):
    resumed = make_record(
        facts={"loads": [{"update": 2, "folder": ""}], "initial_hashes": {name: f"{name} 2" for name in NAMES}},
        **changes,
    )
    del resumed.rank0_updates[1], resumed.rank0_updates[2]
    return make_runs(repeat=make_record(facts={"saves": [{"update": 2, "folder": ""}]}), resumed=resumed)


@pytest.mark.parametrize(
    ("loaders", "remedy"),
    [({}, "with --updates N, verify runs as many updates"), ({"0": {}}, "with automatic_checkpoint_naming=True")],
)
def test_the_remedy_for_a_missing_checkpoint_fits_the_script(loaders, remedy):
    """Without a prepared loader, verify cannot save a checkpoint, also with automatic naming."""
    facts = {"loaders": loaders}
    verdict = PROOFS["resume"](make_runs(baseline=make_record(facts=facts), repeat=make_record(facts=facts)))
    assert verdict.status == "NOT CHECKED"
    assert remedy in verdict.reason


def test_exact_resume_passes():
    assert PROOFS["resume"](make_resumed()).status == "PASS"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({3: {"losses": [9.0]}}, "update 3, the first after the resume: the loss is 9 instead of"),
        (
            {3: {"learning_rates": [0.5], "parameter_hashes": {"first.weight": "x"}}},
            "the learning rate is 0.5 instead of 0.1",
        ),
        (
            {4: {"parameter_hashes": {"first.weight": "x"}}},
            "update 4, the second after the resume: first.weight differs after the step",
        ),
        ({3: {"batches": [{"loader": 0, "row_hashes": ["row 8"]}]}}, "the resumed run trains on other samples"),
    ],
)
def test_inexact_resume_names_the_difference(changes, reason):
    verdict = PROOFS["resume"](make_resumed(changes=changes))
    assert verdict.status == "FAIL"
    assert reason in verdict.reason


def test_script_that_loads_nothing_is_not_checked():
    runs = make_runs(repeat=make_record(facts={"saves": [{"update": 2, "folder": ""}]}), resumed=make_record())
    assert PROOFS["resume"](runs).status == "NOT CHECKED"


# -------------------------------------------------------------------- learning, memory, data


@pytest.mark.parametrize(
    ("facts", "changes", "reason"),
    [
        (
            {"optimized_parameters": ["first.weight", "first.bias"]},
            {},
            "last.weight is trainable, but belongs to no prepared optimizer",
        ),
        ({}, {"gradient_norms": {"first.weight": 1.0, "first.bias": 1.0}}, "last.weight got no gradient in 4 updates"),
        ({}, {"gradient_norms": dict.fromkeys(NAMES, math.nan)}, "update 1: the gradient of first.weight, first.bias"),
        (
            {},
            {"gradient_norms": {"first.weight": 1.0, "first.bias": 1.0, "last.weight": 0.0}},
            "the gradient of last.weight is zero",
        ),
        (
            {},
            {"parameter_hashes": {name: f"{name} 0" if name == "last.weight" else "moved" for name in NAMES}},
            "but did not change",
        ),
        (
            {
                "trainable_parameters": ["first.weight"],
                "frozen_parameters": ["last.weight"],
                "optimized_parameters": list(NAMES),
            },
            {},
            "last.weight is frozen, but changed",
        ),
    ],
)
def test_parameters_that_do_not_learn_are_named(facts, changes, reason):
    baseline = make_record(facts=facts, changes=dict.fromkeys(range(1, 5), changes))
    verdict = PROOFS["learning"](make_runs(baseline=baseline))
    assert verdict.status == "FAIL"
    assert reason in verdict.reason


def test_bias_with_a_zero_gradient_passes_beside_a_weight_that_learns():
    norms = {"first.weight": 1.0, "first.bias": 0.0, "last.weight": 1.0}
    hashes = {"first.weight": "x", "first.bias": "first.bias 0", "last.weight": "y"}
    baseline = make_record(
        changes={number: {"gradient_norms": norms, "parameter_hashes": hashes} for number in range(1, 5)}
    )
    assert PROOFS["learning"](make_runs(baseline=baseline)).status == "PASS"


def test_growing_memory_fails():
    baseline = make_record(num_updates=6)
    for number, update in baseline.rank0_updates.items():
        baseline.rank0_updates[number] = replace(update, resident_bytes=100_000_000 + 4_000_000 * number)
    assert "grows by about" in PROOFS["memory"](make_runs(baseline=baseline)).reason


def test_waiting_for_data_fails():
    batches = [{"loader": 0, "row_hashes": [], "wait_seconds": 0.9}]
    baseline = make_record(changes={number: {"batches": batches} for number in range(1, 5)})
    assert "updates wait for data" in PROOFS["data"](make_runs(baseline=baseline)).reason


def make_waiting_runs(wait_seconds: float) -> RunSet:
    """Return runs whose updates take one second, of which they wait for data for some time."""
    batch = {"loader": 0, "row_hashes": ["row"], "unpadded_hashes": ["row"], "indices": []}
    batch |= {"wait_seconds": wait_seconds, "cpu_seconds": 0.0}
    changes = {number: {"batches": [batch], "cpu_seconds": 1.0} for number in range(1, 5)}
    return make_runs(baseline=make_record(changes=changes))


def test_updates_that_wait_for_data_fail():
    assert PROOFS["data"](make_waiting_runs(0.1)).status == "PASS"
    verdict = PROOFS["data"](make_waiting_runs(0.6))
    assert verdict.status == "FAIL"
    assert "600.0 ms per update, 60 % of its time" in verdict.reason


def test_wait_without_prepared_loader_is_not_checked():
    verdict = PROOFS["data"](make_runs())  # the batches have no times
    assert verdict.status == "NOT CHECKED"
    assert "no prepared loader" in verdict.reason
