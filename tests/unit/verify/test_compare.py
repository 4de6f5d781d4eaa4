"""Test the tolerance of comparisons: tight in float32, and wider and growing where each rank rounds its gradients."""

from pathlib import Path

import pytest

from headway.verify.compare import FLOOR, estimate_tolerance
from headway.verify.records import RunRecord
from headway.verify.request import RunRequest


def make_run(folder: Path, **facts: object) -> RunRecord:
    return RunRecord(RunRequest("baseline", str(folder), str(folder)), 1, 0, "", facts_by_rank=[facts])


@pytest.mark.parametrize("facts", [{}, {"mixed_precision": "no", "trainable_dtypes": ["float32"]}])
@pytest.mark.parametrize("update", [1, 6])
def test_float32_has_the_same_tolerance_in_each_update(tmp_path: Path, facts: dict[str, object], update: int) -> None:
    assert estimate_tolerance(make_run(tmp_path, **facts), None, update).gradient == 5 * FLOOR


@pytest.mark.parametrize(
    "facts", [{"mixed_precision": "bf16"}, {"trainable_dtypes": ["bfloat16", "float32"]}, {"mixed_precision": "fp16"}]
)
def test_tolerance_of_lower_precision_is_wider_and_grows(tmp_path: Path, facts: dict[str, object]) -> None:
    run = make_run(tmp_path, **facts)
    first, later, last = (estimate_tolerance(run, None, update).gradient for update in (1, 3, 100))
    assert 5 * FLOOR < first < later <= last <= 0.25
