"""Test predictions of the largest batch size from recorded and constructed curves of memory per number of rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.memory.row_curve import RowCurve, RowPeak

GPT2 = {2: (2.93, 6.26), 3: (4.26, 8.06), 4: (5.61, 6.26), 5: (6.95, 8.06), 7: (9.64, 10.04), 8: (10.97, 11.57)}
"""GiB above weights and optimizer state of GPT-2 124M in bf16 with rows of 1,024 tokens: allocated and reserved.

Recorded from torch's allocator over the simulated runtime, under 16 GiB, of which 1.93 are taken. Pieces of 9 rows fit,
pieces of 10 do not.
"""


def build_curve(peaks: dict[int, tuple[float, float]]) -> RowCurve:
    curve = RowCurve()
    for rows, (allocated, reserved) in peaks.items():
        curve.record_peak(RowPeak(rows, allocated, reserved))
    return curve


@pytest.mark.parametrize(
    ("measured", "predicted"), [((3, 5), 8), ((2, 5), 8), ((2, 4), 9), ((5, 3, 7), 9), ((2, 4, 8), 9), ((5,), 8)]
)
def test_curve_predicts_the_largest_batch_from_measured_ones(measured: tuple[int, ...], predicted: int) -> None:
    assert build_curve({rows: GPT2[rows] for rows in measured}).predict_largest(16 - 1.93) == predicted


@given(st.integers(0, 10**10), st.integers(1, 10**8), st.integers(1, 30), st.integers(2, 8), st.integers(0, 10**12))
def test_line_is_continued_exactly(constant: int, slope: int, small: int, factor: int, available: int) -> None:
    """If nearly all of the memory is constant, the curve uses a larger slope than measured."""
    large = small * factor
    curve = build_curve({rows: (constant + slope * rows,) * 2 for rows in (small, large)})
    found = curve.predict_largest(available)
    assert found is not None
    if 8 * slope * large >= constant + slope * large:
        expected = max(0, (available - constant) // slope)
        assert abs(found - expected) <= 1e-6 * expected + (available < constant + slope * large)
    elif found > large:
        assert constant + slope * found <= available, "the prediction must not be too large"


@pytest.mark.parametrize("power", [1.2, 1.5, 2.0])
def test_steeper_curve_is_corrected_by_another_measurement(power: float) -> None:
    """With attention without fused kernels, each prediction is too large, and the next one is better."""

    def compute_use(rows: int) -> float:
        return 100 + 10 * rows**power

    curve = RowCurve()
    for rows in (2, 4):
        curve.record_peak(RowPeak(rows, compute_use(rows), compute_use(rows)))
    largest = max(rows for rows in range(1, 100) if compute_use(rows) <= 2000)
    first = curve.predict_largest(2000)
    assert first is not None
    curve.record_peak(RowPeak(2 * largest // 3, compute_use(2 * largest // 3), compute_use(2 * largest // 3)))
    second = curve.predict_largest(2000)
    assert second is not None
    assert largest <= second <= first
    assert second <= 1.5 * largest


def test_flatter_curve_is_predicted_too_small() -> None:
    def compute_use(rows: int) -> float:
        return 100 + 100 * rows**0.5

    found = build_curve({rows: (compute_use(rows),) * 2 for rows in (4, 8)}).predict_largest(1100)
    assert found is not None
    assert 8 < found <= 100


def test_allocator_steps_are_not_used_as_a_slope() -> None:
    """Similar sizes can take equally much memory, or differ by a whole block."""
    curve = build_curve({7: (700, 700), 6: (700, 700)})
    assert curve.predict_largest(1000) == 10, "predicted in proportion, as from one size"
    curve.record_peak(RowPeak(3, 300, 300))
    assert curve.predict_largest(1000) == 10


def test_constant_peak_has_a_minimum_slope() -> None:
    curve = build_curve({2: (800, 800), 4: (800, 800)})
    assert curve.predict_largest(1000) == 4 + 200 // 25, "an eighth of the memory per row"


def test_fragmentation_is_left_free_and_grows_with_rows() -> None:
    assert build_curve({5: (50, 50), 10: (100, 100)}).predict_largest(200) == 20
    assert build_curve({5: (50, 50), 10: (100, 120)}).predict_largest(200) == 16
    assert build_curve({5: (50, 99), 10: (100, 100)}).predict_largest(200) == 20, "only at the largest size"


def test_without_measurements_nothing_is_predicted() -> None:
    curve = build_curve({4: (1, 1)})
    curve.clear()
    assert (curve.predict_largest(100), curve.unused) == (None, 0)
    assert build_curve({4: (0, 0)}).predict_largest(100) == 4
    assert build_curve({4: (50, 50)}).predict_largest(10) == 0
