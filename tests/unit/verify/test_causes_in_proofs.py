"""Test that proofs name one cause and its line, from facts of records built by hand."""

from dataclasses import replace
from typing import Any

import pytest

from headway.verify.blame import Blame
from headway.verify.causes import explain_parts
from headway.verify.proofs import PROOFS
from headway.verify.proofs.repeats import sort_by_distance
from headway.verify.record_types import CallEntry, LossEntry
from headway.verify.verdict import RunSet
from tests.unit.verify.made_records import NAMES, make_record
from tests.unit.verify.test_proofs import make_resumed, make_runs

OPTIMIZER = {"type": "Adam", "line": "train.py:9", "parameters": []}
FROZEN = {
    "trainable_parameters": ["first.weight"],
    "frozen_parameters": ["first.bias", "last.weight"],
    "optimizers": [OPTIMIZER],
}
LEARNED = {
    "gradient_norms": {"first.weight": 1.0},
    "parameter_hashes": {name: f"{name} 0" for name in NAMES} | {"first.weight": "moved"},
}


def make_first(facts: dict[str, Any], change: dict[str, Any] | None = None) -> RunSet:
    """Return runs whose first one has other facts, and a change in every update."""
    return make_runs(baseline=make_record(facts=facts, changes={number: change or {} for number in range(1, 5)}))


# -------------------------------------------------------------------- learning


def test_parameter_without_an_optimizer_is_named_with_the_optimizers_line() -> None:
    verdict = PROOFS["learning"](make_first({"optimized_parameters": ["first.weight"], "optimizers": [OPTIMIZER]}))
    assert "last.weight is trainable, but belongs to no prepared optimizer (Adam at train.py:9)" in verdict.reason


@pytest.mark.parametrize(
    ("held", "status"),
    [
        (["first.weight", "first.bias"], "FAIL"),  # a selection with one of two frozen parameters
        (list(NAMES), "PASS"),  # model.parameters()
        (["first.weight"], "PASS"),  # only parameters that learn
    ],
)
def test_only_a_selected_frozen_parameter_fails(held: list[str], status: str) -> None:
    verdict = PROOFS["learning"](make_first({**FROZEN, "optimized_parameters": held}, LEARNED))
    assert verdict.status == status, verdict
    assert ("first.bias was given to the optimizer, but is frozen" in verdict.reason) == (status == "FAIL")


def test_buffer_that_changes_in_evaluation_is_named_with_its_line() -> None:
    runs = make_first({}, {"write_lines": {"scale": ["train.py:20 in forward"]}})
    runs.probed = make_record(facts={"buffers_changed_by_eval": ["scale"]})
    assert "the buffer scale changes at train.py:20 in forward" in PROOFS["learning"](runs).reason


@pytest.mark.parametrize(
    ("stale", "moves", "status"),
    [(["last.weight"], True, "FAIL"), (["last.weight"], False, "PASS"), ([], True, "PASS")],
)
def test_parameter_that_changes_after_it_was_frozen_fails(stale: list[str], moves: bool, status: str) -> None:
    runs = make_first({})
    for number in (3, 4):
        runs.baseline.rank0_updates[number].frozen_with_gradient.extend(stale)
        if not moves:
            runs.baseline.rank0_updates[number].parameter_hashes["last.weight"] = runs.baseline.rank0_updates[
                2
            ].parameter_hashes["last.weight"]
    verdict = PROOFS["learning"](runs)
    assert verdict.status == status, verdict
    assert ("last.weight is frozen in update 3, but the optimizer still changes" in verdict.reason) == (
        status == "FAIL"
    )


@pytest.mark.parametrize(("updates", "status"), [((1, 2), "FAIL"), ((3,), "PASS")])
def test_repeatedly_discarded_gradients_fail(updates: tuple[int, ...], status: str) -> None:
    runs = make_first({})
    for number in updates:
        runs.baseline.rank0_updates[number].discard_lines.append("train.py:21 in main")
    verdict = PROOFS["learning"](runs)
    assert verdict.status == status, verdict
    assert ("zero_grad() at train.py:21 in main" in verdict.reason) == (status == "FAIL")


@pytest.mark.parametrize(
    ("modes", "dropouts", "status"),
    [
        ((["train"], ["train"], ["eval"], ["eval"]), 1, "FAIL"),
        ((["train"], ["train"], ["eval"], ["eval"]), 0, "PASS"),  # the mode changes nothing
        ((["eval"], ["eval"], ["eval"], ["eval"]), 1, "PASS"),  # trained in evaluation mode on purpose
        ((["train"], ["eval", "train"], ["train"], ["eval", "train"]), 1, "PASS"),  # an evaluation with gradients
        ((["train"], ["train"], ["train"], ["eval"]), 1, "PASS"),
    ],
)
def test_model_that_stays_in_evaluation_mode_fails(modes: Any, dropouts: int, status: str) -> None:
    runs = make_first({"num_dropout_rates": dropouts, "eval_lines": {"train.py:7 in evaluate": "eval"}})
    for number, found in enumerate(modes, 1):
        runs.baseline.rank0_updates[number].training_modes["0"] = found
    verdict = PROOFS["learning"](runs)
    assert verdict.status == status, verdict
    expected = "from update 3 on, the model is trained in evaluation mode: eval() at train.py:7 in evaluate"
    assert (expected in verdict.reason) == (status == "FAIL")


def test_parameter_without_a_gradient_is_named_with_the_call_that_detaches_it() -> None:
    runs = make_first({}, {"gradient_norms": {"first.weight": 1.0, "first.bias": 1.0}})
    calls = [
        CallEntry(func="input", model_tensor="last.weight", line="train.py:5", shape=[1]),
        CallEntry(func="linear", line="train.py:5 in forward", inputs=[0], is_cut=True, shape=[1]),
    ]
    runs.baseline.__dict__["_losses_by_rank"] = {0: [make_loss(calls)]}
    verdict = PROOFS["learning"](runs)
    assert "last.weight got no gradient" in verdict.reason
    assert verdict.details == ("linear() at train.py:5 in forward detaches its result from the graph",)


# -------------------------------------------------------------------- processes and samples


def make_unlike(num_losses: int = 1, **changes: Any) -> RunSet:
    """Return runs whose gradients differ on two processes, with a change in each update of rank 0."""
    several = make_record(num_ranks=2, noise=0.3, changes={1: {"losses": [1.0] * num_losses, **changes}})
    return make_runs(several=several)


def test_gradients_clipped_before_the_last_micro_batch_are_the_cause() -> None:
    reason = PROOFS["processes"](make_unlike(2, gradient_lines={"train.py:31": [1, 2]})).reason
    assert "train.py:31 changes gradients before all micro-batches of the update are added up" in reason


def test_line_that_changes_gradients_on_several_processes_is_named() -> None:
    reason = PROOFS["processes"](make_unlike(2, gradient_lines={"train.py:31": [2]})).reason
    assert "train.py:31 changes gradients, and not in the same way on several processes" in reason


def test_line_that_changes_gradients_is_named_if_only_the_layout_differs() -> None:
    layout = make_record(num_ranks=2, noise=0.3, changes={1: {"gradient_lines": {"train.py:24": [1]}}})
    runs = make_runs(layout=layout, layout_name="fsdp")
    assert PROOFS["processes"](runs).status == "PASS"
    assert "one rank's shard: train.py:24 changes gradients" in PROOFS["layout"](runs).reason


def test_learning_rates_that_differ_between_ranks_are_named_with_the_line() -> None:
    several = make_record(num_ranks=2, code=1, changes={2: {"rate_lines": ["train.py:36 in main"]}})
    several.output = (
        "headway.errors.StateError: the optimizers of the ranks are not alike: 'lr' of parameter group 0 is 1"
    )
    reason = PROOFS["processes"](make_runs(several=several)).reason
    assert "set other learning rates at train.py:36 in main" in reason


def test_outputs_that_depend_on_padding_are_a_cause() -> None:
    runs = make_unlike()
    runs.probed = make_record(facts={"leak_entries": [{"kind": "padding", "is_leak": True, "description": ""}]})
    assert "the outputs depend on padding" in PROOFS["processes"](runs).reason


def make_loss(calls: list[CallEntry], value: float = 1.0) -> LossEntry:
    """Return the loss of update 1 that two calls have computed."""
    return LossEntry(update=1, loss_call=1, value=value, weight=None, reduction="mean", line="train.py:21", calls=calls)


def make_number_trace(value: float) -> list[LossEntry]:
    """Return the trace of a loss that is multiplied by a number."""
    rows = [[value, value, value]]
    calls = [
        CallEntry(func="input", line="train.py:20", shape=[], row_sums=[[1.0, 1.0, 1.0]]),
        CallEntry(func="mul", line="train.py:20", inputs=[0], shape=[], row_sums=rows, numbers=[value]),
    ]
    return [make_loss(calls, value)]


@pytest.mark.parametrize("is_lone", [True, False])
def test_generator_advanced_by_only_one_rank_is_the_cause(is_lone: bool) -> None:
    runs = make_unlike()
    assert runs.several is not None
    assert runs.reference is not None
    runs.reference.__dict__["_losses_by_rank"] = {0: make_number_trace(1.0)}
    runs.several.__dict__["_losses_by_rank"] = {0: make_number_trace(1.0), 1: make_number_trace(3.0)}
    for facts in runs.several.facts_by_rank[: 1 if is_lone else 2]:
        facts.global_draw_lines = {"train.py:38": "random.randrange"}
    reason = PROOFS["processes"](runs).reason
    assert "a number in mul() at train.py:20" in reason
    assert ("only rank 0 draws from random.randrange() at train.py:38" in reason) == is_lone


def make_draw_trace(value: float) -> list[LossEntry]:
    """Return the trace of a loss that is drawn from a generator."""
    trace = make_number_trace(value)
    trace[0].calls[1] = replace(trace[0].calls[1], func="uniform_", numbers=[])
    return trace


def test_different_draws_within_a_group_are_the_cause_of_an_error() -> None:
    layout = make_record(num_updates=0, num_ranks=2, code=1, facts={"data_shard_index": 0, "strategy": "tp"})
    layout.output = "headway.errors.PrepareError: the gradients of 2 parameters differ between ranks 0, 1"
    runs = make_runs(layout=layout, layout_name="tp")
    assert runs.reference is not None
    runs.reference.__dict__["_losses_by_rank"] = {0: make_draw_trace(1.0)}
    layout.__dict__["_losses_by_rank"] = {0: make_draw_trace(1.0), 1: make_draw_trace(3.0)}
    verdict = PROOFS["layout"](runs)
    assert "uniform_() at train.py:20 draws other random numbers on each rank" in verdict.reason
    assert "differ between ranks 0, 1" in verdict.details[0]


@pytest.mark.parametrize(("noise", "status"), [(1e-7, "NOT CHECKED"), (0.3, "FAIL")])
def test_equal_draws_required_by_the_layout_are_no_alarm(noise: float, status: str) -> None:
    layout = make_record(num_ranks=2, noise=noise, facts={"data_shard_index": 0, "strategy": "tp"})
    runs = make_unlike()
    runs.layout, runs.layout_name = layout, "tp"
    assert runs.several is not None
    assert runs.reference is not None
    runs.reference.__dict__["_losses_by_rank"] = {0: make_draw_trace(1.0)}
    runs.several.__dict__["_losses_by_rank"] = {0: make_draw_trace(1.0), 1: make_draw_trace(3.0)}
    verdict = PROOFS["processes"](runs)
    assert verdict.status == status, verdict


def test_model_changed_by_only_one_rank_is_the_cause() -> None:
    runs = make_unlike()
    assert runs.several is not None
    assert runs.reference is not None
    traces = [make_number_trace(1.0), make_number_trace(3.0)]
    for each in traces:
        each[0].calls[1] = replace(each[0].calls[1], func="input", variable="weight of a Linear", inputs=[], numbers=[])
        each[0].update = 2
    runs.reference.__dict__["_losses_by_rank"] = {0: traces[0]}
    runs.several.__dict__["_losses_by_rank"] = {0: traces[0], 1: traces[1]}
    for number in NAMES:  # the first update is equal
        runs.several.gradients(1)[number]
        for key in ("g", "p"):
            runs.several.__dict__["_arrays_by_update"][1][f"{key}:{number}"] = runs.reference.__dict__[
                "_arrays_by_update"
            ][1][f"{key}:{number}"]
    runs.several.rank0_updates[1].unprepared_write_lines["Teacher, created at train.py:9"] = ["train.py:14 in update"]
    reason = PROOFS["processes"](runs).reason
    assert "only rank 0 changes the weights of Teacher, created at train.py:9: train.py:14 in update" in reason


@pytest.mark.parametrize(("values", "status"), [((0.5, 0.6), "FAIL"), ((0.5, 0.5), "PASS")])
def test_scheduler_with_another_value_on_each_rank_fails(values: tuple[float, float], status: str) -> None:
    several = make_record(num_ranks=2)
    for facts, value in zip(several.facts_by_rank, values, strict=True):
        facts.scheduler_metrics = [{"update": 1, "value": value, "line": "train.py:30"}]
    verdict = PROOFS["processes"](make_runs(several=several))
    assert verdict.status == status, verdict
    assert ("at train.py:30" in verdict.reason) == (status == "FAIL")


def test_learning_rate_that_differs_is_named_with_its_line() -> None:
    several = make_record(
        num_ranks=2, changes={1: {"learning_rates": [0.2], "rate_lines": ["train.py:40 by LambdaLR"]}}
    )
    for name in NAMES:
        several.gradients(1)
        several.__dict__["_arrays_by_update"][1][f"p:{name}"] += 0.5
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
        number: {
            "batches": [{"loader": 0, "epoch": 0, "position": number, "row_hashes": [row], "unpadded_hashes": [row]}]
        }
        for number, row in enumerate(rows, 1)
    }
    baseline = make_record(facts={"loaders": {"0": about}}, changes=changes)
    verdict = PROOFS["samples"](make_runs(baseline=baseline, reference=baseline, several=baseline))
    assert verdict.status == status, verdict


@pytest.mark.parametrize(
    ("indices", "workers", "status"),
    [
        ([0, 1, 2, 3], 2, "NOT CHECKED"),  # augmentation in workers
        ([0, 1, 2, 3], 0, "FAIL"),  # the different contents are not explained by randomness
        ([0, 1, 2, 9], 2, "FAIL"),
    ],
)
def test_contents_drawn_by_workers_are_no_alarm(indices: list[int], workers: int, status: str) -> None:
    loader = {"dataset": "Images", "length": 16, "batch_size": 4, "workers": workers, "line": "train.py:5"}

    def make(num_ranks: int, name: str, found: list[int]) -> Any:
        record = make_record(num_ranks=num_ranks, noise=0.3 * (num_ranks - 1), facts={"loaders": {"0": loader}})
        size = 4 // num_ranks
        for rank, updates in enumerate(record.updates_by_rank):
            for each in updates.values():
                rows = [f"{name} {rank * size + number}" for number in range(size)]
                part = found[rank * size : (rank + 1) * size]
                each.batches[:] = [{"loader": 0, "row_hashes": rows, "unpadded_hashes": rows, "indices": part}]
        return record

    reference = make(1, "row", [0, 1, 2, 3])
    runs = make_runs(baseline=reference, reference=reference, several=make(2, "other row", indices))
    verdict = PROOFS["processes"](runs)
    assert verdict.status == status, verdict
    assert ("their contents vary (workers may draw random numbers)" in verdict.reason) == (status == "NOT CHECKED")
    assert PROOFS["samples"](runs).status == ("PASS" if status == "NOT CHECKED" else "FAIL")


@pytest.mark.parametrize("kind", ["tokens", "classes", "count"])
def test_advice_for_accelerates_api_uses_that_api(kind: str) -> None:
    blame = Blame(kind, "train.py:9 in main", "cross_entropy")
    assert "backward(loss, weight=" in explain_parts(blame, "rank").advice
    assert "backward" not in explain_parts(blame, "rank", is_accelerate=True).advice


@pytest.mark.parametrize(
    ("function", "advice"), [("view", "transpose dimensions before"), ("softmax", "attention needs a causal mask")]
)
def test_leak_by_a_change_of_shape_has_its_own_advice(function: str, advice: str) -> None:
    call = f"{function}() at train.py:41 in forward"
    finding = {
        "kind": "future",
        "is_leak": True,
        "description": f"changing tokens changes outputs: {call}",
        "call": call,
    }
    runs = make_runs(probed=make_record(facts={"leak_entries": [finding]}))
    verdict = PROOFS["leaks"](runs)
    assert verdict.status == "FAIL"
    assert advice in verdict.advice


# -------------------------------------------------------------------- repeats and resumes


@pytest.mark.parametrize(
    ("facts", "there", "text"),
    [
        (
            {"seed_lines": {"train.py:3": "1"}},
            {"seed_lines": {"train.py:3": "2"}},
            "the seed at train.py:3 is another one",
        ),
        ({"generator_hashes": {"torch": "a"}}, {"generator_hashes": {"torch": "b"}}, "no seed is set"),
        ({"unseeded_lines": {"train.py:4": "default_rng()"}}, {}, "default_rng() at train.py:4 has no seed"),
        ({"suspects": {"unseeded": {"train.py:4": "RandomState"}}}, {}, "RandomState() at train.py:4 has no seed"),
        (
            {"suspects": {"outside": {"train.py:9": "datetime.now"}}},
            {},
            "the script reads the clock or another value from outside, datetime.now() at train.py:9",
        ),
        ({}, {"reversed_listing_lines": ["train.py:5"]}, "they follow the order of a folder's files"),
        (
            {"clock_lines": {"train.py:6": "time.time"}},
            {},
            "the script reads the clock or another value from outside, time.time() at train.py:6",
        ),
        ({}, {}, "the order of a set or hash() is left"),
    ],
)
def test_runs_that_differ_name_the_change_between_them(facts: Any, there: Any, text: str) -> None:
    baseline = make_record(facts=facts)
    repeat = make_record(facts={**facts, **there}, changes={1: {"losses": [7.0]}})
    verdict = PROOFS["repeat"](make_runs(baseline=baseline, repeat=repeat))
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
def test_other_samples_after_a_resume_name_the_object_without_state(about: Any, batch: Any, text: str) -> None:
    batches = [{"loader": 0, "row_hashes": ["other"], "unpadded_hashes": ["other"], **batch}]
    runs = make_resumed(changes={3: {"batches": batches}})
    if "epoch" in batch:
        for number in (3, 4):
            runs.baseline.rank0_updates[number].batches[0]["epoch"] = 1
    if "indices" in batch:
        runs.baseline.rank0_updates[3].batches[0]["indices"] = [1]
    loader = {"dataset": "Rows", "length": 9, "workers": 0, "line": "train.py:8", **about}
    assert runs.resumed is not None
    runs.resumed.facts_by_rank[0].loaders = {"0": loader}
    assert text in PROOFS["resume"](runs).reason


def test_dataset_that_writes_into_its_tensor_is_named() -> None:
    runs = make_resumed(
        changes={3: {"batches": [{"loader": 0, "row_hashes": ["other"], "unpadded_hashes": ["other"]}]}}
    )
    runs.baseline.rank0_updates[3].batches[0]["indices"] = runs.resumed.rank0_updates[3].batches[0]["indices"] = [1]  # type: ignore[union-attr]
    runs.baseline.facts_by_rank[0].changed_dataset_tensors = {"0": ["Images.images"]}
    verdict = PROOFS["resume"](runs)
    assert "writes into its own tensor Images.images" in verdict.reason
    assert "change a copy" in verdict.advice


def test_parameter_group_whose_learning_rate_differs_is_named() -> None:
    rates = {"learning_rates": [0.1, 0.5], "parameter_hashes": {"first.weight": "x"}}
    runs = make_resumed(changes={3: rates})
    runs.baseline.rank0_updates[3].learning_rates[:] = [0.1, 0.2]
    assert "the learning rate is 0.5 instead of 0.2" in PROOFS["resume"](runs).reason


def test_loss_of_a_later_micro_batch_that_differs_is_named() -> None:
    runs = make_resumed(changes={3: {"losses": [1.0, 3.0]}})
    runs.baseline.rank0_updates[3].losses[:] = [1.0, 2.0]
    assert "the loss is 3 instead of 2" in PROOFS["resume"](runs).reason
    runs = make_runs(baseline=runs.baseline, repeat=runs.resumed)
    assert "(2, 3)" in PROOFS["repeat"](runs).reason


@pytest.mark.parametrize("update", [1, 10])
def test_only_samples_of_the_first_update_mean_that_the_pass_begins_anew(update: int) -> None:
    baseline = make_record(num_updates=12, facts={"loaders": {"0": {"line": "train.py:8"}}})
    batches = baseline.rank0_updates[update].batches
    runs = make_resumed(num_updates=12, changes={3: {"batches": batches}})
    assert runs.resumed is not None
    runs.baseline, runs.reference = baseline, baseline
    runs.resumed.facts_by_rank[0].loaders = {"0": {"line": "train.py:8"}}
    verdict = PROOFS["resume"](runs)
    assert f"they are the samples of update {update}" in verdict.details
    assert ("begins anew after the resume" in verdict.reason) == (update == 1)


def test_parameter_group_of_only_one_run_is_no_crash() -> None:
    several = make_record(num_ranks=2, changes={1: {"learning_rates": [0.1, 0.1]}})
    for name in NAMES:
        several.gradients(1)
        several.__dict__["_arrays_by_update"][1][f"p:{name}"] += 0.5
    assert "the optimizer's step differs" in PROOFS["processes"](make_runs(several=several)).reason


def test_parameter_that_only_the_resumed_run_has_is_named() -> None:
    runs = make_resumed(changes={})
    assert runs.resumed is not None
    runs.resumed.facts_by_rank[0].trainable_parameters = [*NAMES, "head.weight"]
    runs.resumed.facts_by_rank[0].optimized_parameters = list(NAMES)
    reason = PROOFS["resume"](runs).reason
    assert "the model has a parameter head.weight that it does not have without the kill" in reason
    assert "no optimizer trains it" in reason


def test_clock_read_near_the_difference_is_first() -> None:
    lines = {"train.py:5": "time.time", "train.py:40 in main": "time.monotonic", "other.py:30": "time.time"}
    assert [line for line, _ in sort_by_distance(lines, "train.py:33 in main")] == [
        "train.py:40 in main",
        "train.py:5",
        "other.py:30",
    ]


def test_model_outside_the_checkpoint_is_found_after_equal_losses() -> None:
    runs = make_resumed(changes={4: {"unprepared_hashes": {"AveragedModel, created at train.py:7": "b"}}})
    assert PROOFS["resume"](runs).status == "PASS"
    runs.baseline.rank0_updates[4].unprepared_hashes["AveragedModel, created at train.py:7"] = "a"
    assert "other weights than without the kill: AveragedModel, created at train.py:7" in PROOFS["resume"](runs).reason


# -------------------------------------------------------------------- memory and data


def test_tensors_kept_with_their_graphs_are_named() -> None:
    kept = [{"line": "train.py:12", "updates": [1, 2, 3], "tensor_bytes": 12, "graph_bytes": 9_000_000}]
    assert (
        "tensors made at train.py:12 are kept with their graphs"
        in PROOFS["memory"](make_first({"alive_tensors": kept})).reason
    )


@pytest.mark.parametrize(
    "kept", [{"updates": [5], "graph_bytes": 9_000_000}, {"updates": [1, 2, 3], "graph_bytes": 100}]
)
def test_small_tensors_or_tensors_of_one_update_pass(kept: dict[str, Any]) -> None:
    verdict = PROOFS["memory"](make_first({"alive_tensors": [{"line": "train.py:12", "tensor_bytes": 12, **kept}]}))
    assert verdict.status != "FAIL"


@pytest.mark.parametrize(("busy", "status"), [(0.016, "FAIL"), (0.004, "PASS")])
def test_loading_that_takes_most_of_the_cpu_time_fails(busy: float, status: str) -> None:
    batches = [{"loader": 0, "row_hashes": [], "wait_seconds": busy, "cpu_seconds": busy}]
    facts = {"slow_functions": [{"num_samples": 9, "task": "collate", "function": "train.py:3 in blur"}]}
    verdict = PROOFS["data"](make_first(facts, {"batches": batches, "cpu_seconds": 0.02, "seconds": 0.03}))
    assert verdict.status == status, verdict
    assert ("the collate function, train.py:3 in blur" in verdict.reason) == (status == "FAIL")
