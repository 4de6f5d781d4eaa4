"""The host's waits for the device per update, for each feature: docs/synchronizations.md has the numbers that are counted here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.synchronizations.loops import LOOPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "synchronizations.md"
FLOOR = "a loop by hand, pinned and non-blocking"


def run_module(module: str) -> Any:
    """Run a module of this folder in its own process and return its JSON output.

    The process registers a device that other tests must not see.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"tests.synchronizations.{module}"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    found: dict[str, Any] = run_module("count")
    return found


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    found: dict[str, Any] = run_module("scenes")
    return found


def read_table() -> dict[str, int]:
    """Return {feature: waits per update} from the page."""
    rows = re.findall(r"^\| ([^|]+?) \| \d+ \| (\d+) \|", PAGE.read_text(), re.M)
    return {name: int(after) for name, after in rows}


def test_table_has_exactly_the_loops() -> None:
    assert read_table().keys() == LOOPS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_waits_per_update_match_the_page(name: str, counts: dict[str, Any]) -> None:
    found = counts[name]
    assert found.get("later") == read_table()[name], found


def test_loop_by_hand_never_waits_and_blocking_copies_are_counted(counts: dict[str, Any]) -> None:
    assert counts[FLOOR]["later"] == 0
    assert counts["a prepared loop, non_blocking=False"]["where"] == {
        "copy from the host at core/runtime/collectives/tree.py": 2
    }


def test_first_updates_wait_only_for_copies_of_the_model(counts: dict[str, Any]) -> None:
    """Check that the first updates only wait for copies of the model."""
    model = counts[FLOOR]["first"]
    first = {name: found["first"] - model for name, found in counts.items() if read_table()[name] == 0}
    # Automatic micro-batching copies the parameters to the host while an optimizer creates its state.
    assert set(first.values()) <= {0, 2}, first
    assert {name for name, more in first.items() if more} <= {
        'microbatching="auto"', "forward_backward", "forward_backward with weight= on the device",
        "the Trainer, labels counted, batches in pieces",
    }  # fmt: skip


def test_batches_are_copied_from_pinned_memory_on_a_side_stream(scenes: dict[str, Any]) -> None:
    for way in ("side", "waiting"):
        assert scenes["transfers"][way]["kinds"] == {
            "tensor": "fake", "pair": "fake", "packed": "fake, sizes on cpu", "graph": "fake", "plain": "fake",
            "box": "fake fake", "there": "fake",
        }  # fmt: skip
    side = scenes["transfers"]["side"]
    # The object `Plain` waits. Each plain tensor of the other objects is passed to `record_stream`.
    assert (side["waits"], side["recorded"]) == (1, 4)
    assert scenes["transfers"]["waiting"]["waits"] == 7
    # (copies into pinned memory, waits for copies) for pinned tensors, fresh and reused, then for pageable tensors.
    assert scenes["pinned_source"] == [0, 0, 0, 1, 1, 0, 1, 0]
    assert scenes["without_record_stream"] == "BlockingTransfer"
    assert scenes["workers_pin"] == [False, True]


def test_warnings_and_figures_do_not_wait(scenes: dict[str, Any]) -> None:
    assert "contain -100" in scenes["padding"][0]
    assert scenes["padding"][1:] == ["0 waits", "0 waits"]
    assert scenes["figures"] == [
        "0% waiting for data; 0 waits",
        "100 tokens/s, 0% waiting for data; 0 waits",
        "150 tokens/s, 0% waiting for data; 0 waits",
        "200 tokens/s, 0% waiting for data; 0 waits",
        "250",
    ]


def test_loss_that_is_not_finite_is_reported_one_update_later(scenes: dict[str, Any]) -> None:
    told = "update {}: the loss of micro-batch 2 was nan on rank 0, or a gradient of update {} was not finite"
    assert scenes["notice"] == [1, 2, told.format(2, 1), 3, 4, "0 waits", 1, 2, 3, 4, "0 waits", told.format(4, 3)]


def test_ranks_exchange_values_on_the_host(scenes: dict[str, Any]) -> None:
    assert scenes["two_ranks"] == [0, [False, False, True, False, False], 1.0]


def test_values_are_read_later_but_have_the_earlier_state(scenes: dict[str, Any]) -> None:
    assert scenes["readback"] == [1.0, 2.0, 0.0]
    assert scenes["bar"] == ["1/3 | loss 0", "2/3 | loss 1", "3/3 | loss 2"]
    assert scenes["weigher"] == pytest.approx([1.0, 1.0])
