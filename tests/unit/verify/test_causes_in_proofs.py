"""Proofs name one cause and its line, from facts of the runs that are made by hand."""

from typing import Any

import pytest

from headway.verify.proofs import PROOFS
from headway.verify.verdict import RunSet
from tests.unit.verify.made_records import NAMES, make_record
from tests.unit.verify.test_proofs import make_resumed, make_runs

OPTIMIZER = {"type": "Adam", "line": "train.py:9", "parameters": []}
FROZEN = {"trainable": ["first.weight"], "frozen": ["first.bias", "last.weight"], "optimizers": [OPTIMIZER]}
LEARNED = {"norms": {"first.weight": 1.0}, "hashes": {name: f"{name} 0" for name in NAMES} | {"first.weight": "moved"}}


def make_first(facts: dict[str, Any], change: dict[str, Any] | None = None) -> RunSet:
    """Runs whose first one has other facts, and a change in every update."""
    return make_runs(first=make_record(facts=facts, changes={number: change or {} for number in range(1, 5)}))


# -------------------------------------------------------------------- learning


def test_a_parameter_without_an_optimizer_comes_with_the_line_of_the_optimizer() -> None:
    verdict = PROOFS["learning"](make_first({"in_optimizer": ["first.weight"], "optimizers": [OPTIMIZER]}))
    assert "last.weight is trainable, but belongs to no prepared optimizer (Adam at train.py:9)" in verdict.reason


@pytest.mark.parametrize(
    ("held", "status"),
    [
        (["first.weight", "first.bias"], "FAIL"),  # a selection that has one of two frozen parameters
        (list(NAMES), "PASS"),  # model.parameters()
        (["first.weight"], "PASS"),  # only what learns
    ],
)
def test_only_a_selected_parameter_that_is_frozen_fails(held: list[str], status: str) -> None:
    verdict = PROOFS["learning"](make_first({**FROZEN, "in_optimizer": held}, LEARNED))
    assert verdict.status == status, verdict
    assert ("first.bias was given to the optimizer, but is frozen" in verdict.reason) == (status == "FAIL")


def test_a_buffer_that_changes_in_evaluation_is_named_with_its_line() -> None:
    runs = make_first({}, {"written": {"scale": ["train.py:20 in forward"]}})
    runs.probed = make_record(facts={"changes_in_evaluation": ["scale"]})
    assert "the buffer scale changes at train.py:20 in forward" in PROOFS["learning"](runs).reason


# -------------------------------------------------------------------- processes and samples


@pytest.mark.parametrize(("values", "status"), [((0.5, 0.6), "FAIL"), ((0.5, 0.5), "PASS")])
def test_a_scheduler_with_another_value_on_each_rank_fails(values: tuple[float, float], status: str) -> None:
    several = make_record(num_ranks=2)
    for facts, value in zip(several.facts, values, strict=True):
        facts["metrics"] = [[1, value, "train.py:30"]]
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.status == status, verdict
    assert ("at train.py:30" in verdict.reason) == (status == "FAIL")


def test_a_learning_rate_that_differs_comes_with_the_line_that_sets_it() -> None:
    several = make_record(num_ranks=2, changes={1: {"rates": [0.2], "rate_lines": ["train.py:40 by LambdaLR"]}})
    for name in NAMES:
        several.gradients(1)
        several.__dict__["_known"][1][f"p:{name}"] += 0.5
    assert "set at train.py:40 by LambdaLR" in PROOFS["processes"](make_runs(several=several)).reason


@pytest.mark.parametrize(
    ("rows", "workers", "status"),
    [
        (["a", "a", "b", "b"], 2, "FAIL"),
        (["a", "b", "c", "d"], 2, "PASS"),
        (["a", "a", "a", "a"], 2, "PASS"),  # equal data by design
        (["a", "a", "b", "b"], 0, "PASS"),
    ],
)
def test_workers_that_yield_the_whole_stream_fail(rows: list[str], workers: int, status: str) -> None:
    about = {"dataset": "Lines", "length": -1, "batch_size": 1, "workers": workers, "line": "train.py:5"}
    changes = {
        number: {"batches": [{"loader": 0, "epoch": 0, "position": number, "rows": [row], "loose": [row]}]}
        for number, row in enumerate(rows, 1)
    }
    first = make_record(facts={"loaders": {"0": about}}, changes=changes)
    verdict = PROOFS["samples"](make_runs(first=first, reference=first, several=first))
    assert verdict.status == status, verdict


# -------------------------------------------------------------------- repeats and resumes


@pytest.mark.parametrize(
    ("facts", "there", "text"),
    [
        ({"seeds": {"train.py:3": "1"}}, {"seeds": {"train.py:3": "2"}}, "the seed at train.py:3 is another one"),
        ({"seeds_at_start": {"torch": "a"}}, {"seeds_at_start": {"torch": "b"}}, "no seed is set"),
        ({"unseeded": {"train.py:4": "default_rng()"}}, {}, "default_rng() at train.py:4 has no seed"),
        ({}, {"listed": ["train.py:5"]}, "they follow the order of a folder's files"),
        (
            {"clocks": {"train.py:6": "time.time"}},
            {},
            "the script reads the clock or a random name, time.time() at train.py:6",
        ),
        ({}, {}, "the order of a set or hash() is left"),
    ],
)
def test_runs_that_differ_name_what_changed_between_them(facts: Any, there: Any, text: str) -> None:
    first = make_record(facts=facts)
    repeat = make_record(facts={**facts, **there}, changes={1: {"losses": [7.0]}})
    verdict = PROOFS["repeat"](make_runs(first=first, repeat=repeat))
    assert verdict.status == "FAIL"
    assert text in verdict.reason


@pytest.mark.parametrize(
    ("about", "batch", "text"),
    [
        (
            {"is_stream": True, "has_state": False},
            {},
            "the stream Rows of the loader at train.py:8 has no state_dict()",
        ),
        (
            {"generators": ["Rows.generator"], "workers": 2},
            {"indices": [1]},
            "by the generator Rows.generator in 2 workers",
        ),
        ({}, {"epoch": 0}, "a pass of the loader at train.py:8 that the run without the kill ends after 2 updates"),
    ],
)
def test_other_samples_after_a_resume_name_what_lacks_state(about: Any, batch: Any, text: str) -> None:
    batches = [{"loader": 0, "rows": ["other"], "loose": ["other"], **batch}]
    runs = make_resumed(changes={3: {"batches": batches}})
    if "epoch" in batch:
        for number in (3, 4):
            runs.first.first[number].batches[0]["epoch"] = 1
    if "indices" in batch:
        runs.first.first[3].batches[0]["indices"] = [1]
    loader = {"dataset": "Rows", "length": 9, "workers": 0, "line": "train.py:8", **about}
    assert runs.resumed is not None
    runs.resumed.facts[0]["loaders"] = {"0": loader}
    assert text in PROOFS["resume"](runs).reason


def test_a_model_outside_of_the_checkpoint_is_found_after_equal_losses() -> None:
    runs = make_resumed(changes={4: {"others": {"AveragedModel, created at train.py:7": "b"}}})
    assert PROOFS["resume"](runs).status == "PASS"
    runs.first.first[4].others["AveragedModel, created at train.py:7"] = "a"
    assert "other weights than without the kill: AveragedModel, created at train.py:7" in PROOFS["resume"](runs).reason


# -------------------------------------------------------------------- memory and data


def test_tensors_that_are_kept_with_their_graphs_are_named() -> None:
    kept = [{"line": "train.py:12", "updates": [1, 2, 3], "bytes": 12, "graph": 9_000_000}]
    assert (
        "tensors made at train.py:12 are kept with their graphs" in PROOFS["memory"](make_first({"kept": kept})).reason
    )


@pytest.mark.parametrize("kept", [{"updates": [5], "graph": 9_000_000}, {"updates": [1, 2, 3], "graph": 100}])
def test_tensors_that_hold_little_or_one_update_pass(kept: dict[str, Any]) -> None:
    verdict = PROOFS["memory"](make_first({"kept": [{"line": "train.py:12", "bytes": 12, **kept}]}))
    assert verdict.status != "FAIL"


@pytest.mark.parametrize(("busy", "status"), [(0.016, "FAIL"), (0.004, "PASS")])
def test_fetching_that_takes_most_of_the_cpu_time_fails(busy: float, status: str) -> None:
    batches = [{"loader": 0, "rows": [], "waited": busy, "busy": busy}]
    facts = {"slow_lines": [[9, "collate", "train.py:3 in blur"]]}
    verdict = PROOFS["data"](make_first(facts, {"batches": batches, "busy": 0.02, "seconds": 0.03}))
    assert verdict.status == status, verdict
    assert ("the collate function, train.py:3 in blur" in verdict.reason) == (status == "FAIL")
