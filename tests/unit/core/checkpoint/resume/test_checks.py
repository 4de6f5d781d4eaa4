"""Test that a load checks all of a manifest before it changes anything."""

import base64
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.checkpoint.format.manifest import MANIFEST
from headway.errors import HeadwayError
from tests.sweep.fuzz import Tally, command_lines, configurations, headers, manifests, mutate, seal_manifest
from tests.sweep.loaded_run import RUNS, Run, save_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return (folder, content of the manifest) of a checkpoint for each kind of run except the first."""
    folders = [save_checkpoint(tmp_path_factory.mktemp("made"), **kind) for kind in RUNS[1:]]
    return [(folder, json.loads((folder / MANIFEST).read_text())["content"]) for folder in folders]


def load_content(folder, run, content):
    """Load a checkpoint with this content and return the error text, or None. A refused load must change nothing."""
    (folder / MANIFEST).write_bytes(seal_manifest(content))
    before, error = run.print(), None
    try:
        run.accelerator.load_state(str(folder))
    except HeadwayError as raised:
        error = str(raised)
    assert error is None or run.print() == before, f"the run was changed before the error: {error}"
    return error


def replace_value(content, path, value):
    """Return a copy of the content with another value at this path. The value `...` deletes the key."""
    content = json.loads(json.dumps(content))
    *way, last = path
    holder = content
    for key in way:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    return content


RUN = ("state", "run")
LOADER = ("state", "loaders", 0, 0)
STREAMS = ("state", "streams", 0)
WRONG = [
    (("about", "world_size"), 2**31), (("about", "world_size"), 0), (("about", "world_size"), ...), (("about", "epoch"), "1"),
    (("about", "versions"), [1]), (("about", "versions"), {"torch": None}), (("about", "saved_by"), [0, 0]),
    (("about", "saved_by"), [1]), (("about", "iteration"), 10**400), (("about", "iteration"), -1), (("about", "metric"), "x"),
    (("about", "notes"), []), (("about", "accumulation"), 0), (("about", "run"), 3),
    ((*RUN, "num_updates"), -1), ((*RUN, "num_updates"), True), ((*RUN, "num_updates"), 1.5), ((*RUN, "epoch"), 2**60),
    ((*RUN, "optimizer_updates"), [1]), ((*RUN, "optimizer_updates"), [1, None]), ((*RUN, "nominal"), [[[1], 4.0]]),
    ((*RUN, "nominal"), [[[-1], 4.0]]), ((*RUN, "nominal"), [[[0], "4"]]), ((*RUN, "nominal"), {}), ((*RUN, "ticks"), [1]),
    ((*RUN, "ticks"), [1, 0]), ((*RUN, "ticks"), [2**31, 2**31]), ((*RUN, "scaler"), ...), ((*RUN, "scaler"), 1),
    ((*RUN, "seeds"), []), ((*RUN, "seeds"), ["1"]), ((*RUN, "seed"), -1), ((*RUN, "trained_on"), [-1]),
    ((*RUN, "read_in_training"), [-1]), ((*RUN, "repeated_calls"), [-1]), ((*RUN, "repeated_calls"), [0] * 9),
    ((*RUN, "passes_over"), [2**40]), ((*RUN, "passes_over"), [-1]), ((*RUN, "passes_over"), [0, 0]), ((*RUN, "passes_over"), [True]),
    ((*RUN, "passes_over"), 3), ((*RUN, "ticks"), [2**30, 1]),
    ((*RUN, "counts_epochs"), "no"), ((*RUN, "precision"), None), ((*RUN, "batch", "sizes"), [0]),
    ((*RUN, "batch", "units"), [None]), ((*RUN, "batch", "asked"), []), ((*RUN, "batch", "trained"), None), ((*RUN, "batch"), []),
    (("state", "loaders"), []), (("state", "loaders", 0), []), (("state", "loaders", 0), {}), ((*LOADER, "epoch"), -1),
    ((*LOADER, "consumed"), ...), ((*LOADER, "consumed"), {"!": "float", "value": "nan"}), ((*LOADER, "source"), None),
    ((*LOADER, "source", "drawn"), 2**70), ((*LOADER, "source", "drawn"), "x"), ((*LOADER, "source", "base_seed"), "AAAA"),
    ((*LOADER, "source", "workers"), None), ((*LOADER, "source", "workers"), {"streams": ["x"], "num_batches": 1}),
    ((*LOADER, "source", "generators"), [base64.b64encode(bytes(5056)).decode()]), ((*LOADER, "source", "global"), "a b c"),
    ((*LOADER, "source", "round_size"), 0),
    (("state", "streams"), ...), (("state", "streams"), []), ((*STREAMS, "torch"), {"!": "tensor", "name": "streams/0.numpy.1"}),
    ((*STREAMS, "torch"), None), ((*STREAMS, "python"), {"0": 3}), ((*STREAMS, "python", "items", 1, "items", 624), 625),
    ((*STREAMS, "numpy", "items", 2), 10**6), ((*STREAMS, "numpy", "items", 2), -1), ((*STREAMS, "numpy", "items", 0), "PCG64"),
    ((*STREAMS, "numpy", "items", 4), "x"), ((*STREAMS, "loaders"), 1),
    (("state", "optimizer", 0, "values", "0/0.weight"), 1), (("state", "optimizer", 0, "values", "nobody"), {}),
    (("state", "optimizer", 0, "values", "0/0.weight", "exp_avg"), "x"), (("state", "optimizer", 0, "groups"), []),
    (("state", "optimizer", 0, "groups", 0, "lr"), "fast"), (("state", "optimizer", 0, "groups", 0, "betas"), [1]),
    (("state", "optimizer", 0, "params", 0), [[]]), (("state", "optimizer", 0, "type"), []), (("state", "optimizer", 0, "rest"), []),
    (("state", "optimizer"), {}), (("state", "extra"), None), (("state", "extra", 0), []), (("state", "scheduler", 0), 3),
    (("state", "scheduler", 1, "base_lrs"), []), (("state", "scheduler", 1, "last_epoch"), {}), (("state", "custom", 0), {"!": "no"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda each: str(each)[:40])
def test_invalid_value_is_refused_before_any_change(checkpoints, tmp_path, path, value):
    folder, content = checkpoints[0]
    error = load_content(folder, Run(tmp_path), replace_value(content, path, value))
    assert error is not None


def test_message_names_the_position(checkpoints, tmp_path):
    folder, content = checkpoints[0]
    run = Run(tmp_path)
    for path, value, said in (
        ((*RUN, "ticks"), [1, 0], r"state.run.ticks[1] is 0, where a whole number from 1"),
        ((*LOADER, "consumed"), "x", "state.loaders[0][0].consumed is 'x', where a whole number from 0"),
        (("about", "world_size"), ..., "manifest's about lacks 'world_size'"),
        (("state", "loaders", 0), [], "state.loaders[0] is [], where a list of 1 belongs"),
    ):
        assert said in load_content(folder, run, replace_value(content, path, value))


def test_tensor_may_be_referenced_only_once(checkpoints, tmp_path):
    """Otherwise, each array of a small file could be read a thousand times."""
    folder, content = checkpoints[0]
    array = content["state"]["custom"][0]["array"]
    for again in (array, {**array, "!": "tensor"}, {"!": "tensor", "name": "model/0/0.weight"}):
        error = load_content(folder, Run(tmp_path), replace_value(content, ("state", "custom", 0, "pair"), again))
        assert "in a second place" in error


def test_state_of_the_fp16_scaler_is_checked(checkpoints, tmp_path):
    folder, content = checkpoints[1]
    assert content["state"]["run"]["scaler"]["scale"] > 0
    run = Run(tmp_path, **RUNS[2])
    for name, value in (
        ("scale", "x"),
        ("scale", -1.0),
        ("growth_interval", 0),
        ("_growth_tracker", ...),
        ("backoff_factor", None),
    ):
        assert "run.scaler" in load_content(folder, run, replace_value(content, (*RUN, "scaler", name), value))
    assert "run.scaler" in load_content(folder, run, replace_value(content, (*RUN, "scaler"), {}))


@pytest.mark.parametrize("kind", range(1, len(RUNS)))
def test_saved_states_are_accepted(checkpoints, tmp_path, kind):
    folder, content = checkpoints[kind - 1]
    run = Run(tmp_path, **RUNS[kind])
    assert load_content(folder, run, content) is None
    run.train(4)


EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [1, 4])
def test_mutated_state_is_loaded_completely_or_refused_without_changes(checkpoints, tmp_path, kind):
    folder, content = checkpoints[kind - 1]
    kept = [Run(tmp_path, **RUNS[kind])]

    @EXAMPLES
    @given(st.sampled_from([*content["state"], "about"]), st.integers(0, 2**32))
    def check(part, seed):
        whole = json.loads(json.dumps(content))
        holder = whole if part in whole else whole["state"]
        holder.update(mutate(random.Random(seed), {part: holder[part]}))
        if load_content(folder, kept[0], whole) is None:
            kept[0] = Run(tmp_path, **RUNS[kind])

    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "count"), [(manifests, 60), (headers, 150), (configurations, 150), (command_lines, 100)]
)
def test_short_fuzzing_sweep_finds_no_fault(act, count):
    """`python -m tests.sweep.fuzz` runs thousands of these cases."""
    tally = Tally(act.__name__)
    act(1, count, tally)
    assert not tally.faults, "\n".join(tally.faults)
    assert len(tally.ends) >= 2, tally  # some cases were accepted, and some were refused
