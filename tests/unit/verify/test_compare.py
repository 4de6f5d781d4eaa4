"""Test the tolerance of comparisons: tight in float32, and wider and growing where each rank rounds its gradients."""

from pathlib import Path

import numpy
import pytest

from headway.verify.compare import FLOOR, compare_update, estimate_tolerance
from headway.verify.record_types import RunFacts
from headway.verify.records import RunRecord
from headway.verify.request import RunRequest


def make_run(folder: Path, **facts: object) -> RunRecord:
    return RunRecord(RunRequest("baseline", str(folder), str(folder)), 1, 0, "", facts_by_rank=[RunFacts(**facts)])


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


def write_gradients(folder: Path, **gradients: list[float]) -> RunRecord:
    """Return a run of one process whose first update has these gradients, and parameters of zeros."""
    folder.mkdir()
    parameters = {f"p:{name}": numpy.zeros(len(values)) for name, values in gradients.items()}
    arrays = parameters | {f"g:{name}": numpy.array(values) for name, values in gradients.items()}
    numpy.savez(folder / "start.0.npz", **parameters)  # type: ignore[arg-type]
    numpy.savez(folder / "update_1.0.npz", **arrays)  # type: ignore[arg-type]
    return make_run(folder)


def test_gradients_that_are_nan_or_zero_can_be_compared(tmp_path: Path) -> None:
    """As in the first update in fp16, whose gradients overflow, with a parameter that the loss does not depend on."""
    run = write_gradients(tmp_path / "one", weight=[float("nan"), 1.0], unused=[0.0, 0.0])
    other = write_gradients(tmp_path / "other", weight=[float("nan"), 1.0], unused=[0.0, 0.0])
    assert compare_update(run, other, 1).gradient_by_name == {"weight": 1.0, "unused": 0.0}
