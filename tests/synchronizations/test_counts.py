"""How often the host waits for the device in an update, feature by feature: what docs/synchronizations.md says is what is counted."""

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


def child(module: str) -> Any:
    """What a process of its own prints: it has a device that the other tests must not see."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"tests.synchronizations.{module}"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    found: dict[str, Any] = child("count")
    return found


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    found: dict[str, Any] = child("scenes")
    return found


def table() -> dict[str, int]:
    """{feature: waits per update}, as the page has them."""
    rows = re.findall(r"^\| ([^|]+?) \| \d+ \| (\d+) \|", PAGE.read_text(), re.M)
    return {name: int(after) for name, after in rows}


def test_every_loop_is_in_the_table_and_the_other_way_round() -> None:
    assert table().keys() == LOOPS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_update_waits_as_often_as_the_page_says(name: str, counts: dict[str, Any]) -> None:
    found = counts[name]
    assert found.get("later") == table()[name], found


def test_the_floor_has_none_and_the_counter_counts(counts: dict[str, Any]) -> None:
    assert counts[FLOOR]["later"] == 0
    assert counts["a prepared loop, non_blocking=False"]["where"] == {
        "copy from the host at core/runtime/collectives/tree.py": 2
    }


def test_nothing_else_waits_in_the_first_updates(counts: dict[str, Any]) -> None:
    """Beside moving the model: the first padding looks were there."""
    model = counts[FLOOR]["first"]
    first = {name: found["first"] - model for name, found in counts.items() if table()[name] == 0}
    # Automatic micro-batching keeps the parameters on the host while an optimizer makes its state: 3 tensors, one more than by hand.
    assert set(first.values()) <= {0, 2}, first
    assert {name for name, more in first.items() if more} <= {
        'microbatching="auto"', "forward_backward", "forward_backward with weight= on the device",
        "the Trainer, labels counted, batches in pieces",
    }  # fmt: skip


def test_batches_come_over_a_side_stream_from_pinned_memory(scenes: dict[str, Any]) -> None:
    for way in ("side", "waiting"):
        assert scenes["transfers"][way]["kinds"] == {
            "tensor": "fake", "pair": "fake", "packed": "fake, sizes on cpu", "graph": "fake", "plain": "fake",
            "box": "fake fake", "there": "fake",
        }  # fmt: skip
    side = scenes["transfers"]["side"]
    # The object that only knows `to` waits; of the others each plain tensor is recorded on the stream that uses it.
    assert (side["waits"], side["recorded"]) == (1, 4)
    assert scenes["transfers"]["waiting"]["waits"] == 7
    # (copies into pinned memory, waits for copies): of fresh and of foreign pinned tensors, and the same of pageable ones.
    assert scenes["pinned_source"] == [0, 0, 0, 1, 1, 0, 1, 0]
    assert scenes["without_record_stream"] == "BlockingTransfer"
    assert scenes["workers_pin"] == [False, True]


def test_nobody_waits_for_what_is_only_told(scenes: dict[str, Any]) -> None:
    assert "contain -100" in scenes["padding"][0]
    assert scenes["padding"][1:] == ["0 waits", "0 waits"]
    assert scenes["figures"] == [
        "0% waiting for data; 0 waits",
        "100 tokens/s, 0% waiting for data; 0 waits",
        "150 tokens/s, 0% waiting for data; 0 waits",
        "200 tokens/s, 0% waiting for data; 0 waits",
        "250",
    ]


def test_a_loss_that_is_not_finite_is_told_late(scenes: dict[str, Any]) -> None:
    told = "update {}: the loss of micro-batch 2 was nan on rank 0, or a gradient of update {} was not finite"
    assert scenes["notice"] == [1, 2, told.format(2, 1), 3, 4, "0 waits", 1, 2, 3, 4, "0 waits", told.format(4, 3)]


def test_ranks_tell_each_other_over_the_host(scenes: dict[str, Any]) -> None:
    assert scenes["two_ranks"] == [0, [False, False, True, False, False], 1.0]


def test_values_are_read_later_and_are_those_of_before(scenes: dict[str, Any]) -> None:
    assert scenes["readback"] == [1.0, 2.0, 0.0]
    assert scenes["bar"] == ["1/3 | loss 0", "2/3 | loss 1", "3/3 | loss 2"]
    assert scenes["weigher"] == pytest.approx([1.0, 1.0])
