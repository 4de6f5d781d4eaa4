"""Comparison of two runs: how much gradients and parameters differ in each update, and where they first differ.

Differences of gradients are relative to the gradients. Differences of parameters are relative to the distance that the
parameters have moved since the start. The tolerance comes from a run that reverses the rows of each batch, which
usually changes only the order of summation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from headway.verify.record_types import UpdateRecord
from headway.verify.records import RunRecord

FLOOR = 2e-4
"""Smallest tolerance for differences relative to a gradient."""
_ROUNDING = {"bf16": 1e-2, "fp16": 2e-3, "fp8": 1e-1, "bfloat16": 1e-2, "float16": 2e-3}
"""Smallest tolerance by number format, for gradients or parameters in a precision lower than float32.

Each process rounds the gradient of its rows. Two units in the last place of the format are allowed.
"""
_DRIFT = 3.0
"""Growth of the rounding tolerance with each update, as a multiple of the tolerance in the first update."""
_MARGIN = 20.0
"""Ratio of the tolerance to the difference that is caused by a changed order of summation."""
_CEILING = 0.25
"""Upper limit of the tolerance that is estimated from a changed order of summation."""
_MOST_ROUNDING = 1e-3
"""Largest relative difference of gradients that is attributed to rounding, without mixed precision."""
_PROPORTIONAL = 0.02
"""Largest relative residual of gradients that differ only by a factor."""


@dataclass(frozen=True)
class Difference:
    """Difference between a reference run and another run in one update.

    All differences are relative: those of gradients to the norm of the gradients, and those of parameters to the
    distance that the parameters have moved since the start of the run.

    Attributes:
        update: Number of the update.
        gradient: Difference of all gradients together.
        movement: Difference of all parameters together, after the update.
        gradient_by_name: Difference of each gradient, by parameter name.
        movement_by_name: Difference of each parameter after the update, by parameter name.
        factor: Factor by which the reference's gradients must be multiplied to fit the other run's gradients best, by
            least squares.
        residual: Difference that remains between the multiplied gradients and the other run's gradients.
        one_sided: Names of the parameters that have a gradient in only one of the runs, or gradients of other shapes.
    """

    update: int
    gradient: float
    movement: float
    gradient_by_name: dict[str, float] = field(default_factory=dict)
    movement_by_name: dict[str, float] = field(default_factory=dict)
    factor: float = 1.0
    residual: float = 0.0
    one_sided: tuple[str, ...] = ()

    @property
    def is_proportional(self) -> bool:
        """Whether the gradients of the two runs differ only by a factor, which is not 1."""
        return self.residual < _PROPORTIONAL and abs(self.factor - 1) > 5 * max(self.residual, FLOOR)


def compare_update(reference: RunRecord, other: RunRecord, update: int) -> Difference:
    """Return the difference between two runs in an update that both have recorded.

    Args:
        reference: Run that is assumed to be correct.
        other: Run to compare with it.
        update: Number of the update.
    """
    ours, theirs = reference.gradients(update), other.gradients(update)
    names = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    our_square = sum(float(ours[name] @ ours[name]) for name in names)
    our_norm = our_square**0.5
    # Factor by which `ours` must be multiplied to come closest to `theirs` (least squares).
    factor = sum(float(ours[name] @ theirs[name]) for name in names) / our_square if our_square else 1.0
    residual = sum(_sum_squares(theirs[name] - factor * ours[name]) for name in names)
    gaps = {name: _sum_squares(theirs[name] - ours[name]) for name in names}
    # A gradient that is much smaller than the average consists of rounding errors, so its norm is raised to this one.
    # The floor comes first, because `max` then also replaces NaN.
    least_norm = max(1e-30, 1e-3 * our_norm / max(1, len(names)) ** 0.5)
    norms = {name: max(_sum_squares(ours[name]) ** 0.5, least_norm) for name in names}
    movement, movement_by_name = _compare_movement(reference.values(0), reference.values(update), other.values(update))
    return Difference(
        update=update,
        gradient=sum(gaps.values()) ** 0.5 / our_norm if our_norm else float(any(gaps.values())),
        movement=movement,
        gradient_by_name={name: gap**0.5 / norms[name] for name, gap in gaps.items()},
        movement_by_name=movement_by_name,
        factor=factor,
        residual=residual**0.5 / max(our_norm * abs(factor), 1e-30),
        one_sided=tuple(name for name in {**ours, **theirs} if name not in names),
    )


class _Movement(NamedTuple):
    """Difference of parameters between two runs, relative to the distance that the parameters have moved.

    Attributes:
        total: Difference of all parameters together.
        by_name: Difference of each parameter, by name.
    """

    total: float
    by_name: dict[str, float]


def _compare_movement(
    initial_values: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> _Movement:
    """Return the difference of parameters between two runs, relative to how far they have moved in the first run.

    Args:
        initial_values: Parameters before the first update, as flat arrays by name.
        ours: Parameters of the first run after an update.
        theirs: Parameters of the other run after this update. Those of another shape are not compared.
    """
    names = [name for name in ours if name in initial_values and name in theirs]
    distances = {name: _sum_squares(ours[name] - initial_values[name]) for name in names}
    gaps = {name: _sum_squares(theirs[name] - ours[name]) for name in names if theirs[name].shape == ours[name].shape}
    total_distance, total_gap = sum(distances.values()), sum(gaps.values())
    # A parameter that has hardly moved differs mainly by rounding errors, so its distance is raised to 1e-3 of the RMS
    # distance.
    least_distance = max(1e-3 * (total_distance / max(1, len(distances))) ** 0.5, 1e-30)
    return _Movement(
        (total_gap / total_distance) ** 0.5 if total_distance else float(bool(total_gap)),
        {name: gap**0.5 / max(distances[name] ** 0.5, least_distance) for name, gap in gaps.items()},
    )


def are_equal(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two runs have recorded the same numbers. NaN counts as equal to NaN."""
    return numpy.array_equal(numpy.asarray(ours), numpy.asarray(theirs), equal_nan=True)


def find_different_norms(ours: UpdateRecord, theirs: UpdateRecord) -> list[str]:
    """Return the names of the parameters whose gradient norms differ between two runs. NaN counts as equal to NaN.

    Parameters that have a gradient only in `theirs` are left out.
    """
    return [
        name
        for name, norm in ours.gradient_norms.items()
        if name not in theirs.gradient_norms or not are_equal([norm], [theirs.gradient_norms[name]])
    ]


def find_different_numbers(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """Return the first pair of numbers that differ at one position of two lists, or None. NaN counts as equal to NaN.

    If one list is longer, its additional numbers are not compared.
    """
    pairs = zip(ours, theirs, strict=False)
    return next((pair for pair in pairs if not are_equal(pair[:1], pair[1:])), None)


def _sum_squares(values: Any) -> float:
    """Return the sum of the squares of a vector's values. NaN and infinite values count as 1e30."""
    finite = numpy.nan_to_num(values, nan=1e30, posinf=1e30, neginf=-1e30)
    return float(finite @ finite)


@dataclass(frozen=True)
class Tolerance:
    """Largest differences in one update that are attributed to the order of summation.

    Attributes:
        gradient: Limit for `Difference.gradient`.
        movement: Limit for `Difference.movement`.
        gradient_by_name: Limit for each parameter in `Difference.gradient_by_name`. A parameter without an entry has
            the limit `gradient`, which is also the lower bound of all entries.
    """

    gradient: float = FLOOR
    movement: float = FLOOR
    gradient_by_name: Mapping[str, float] = field(default_factory=dict)

    def get_gradient_limit(self, name: str) -> float:
        """Return the largest allowed difference of the gradient of the parameter with this name."""
        return max(self.gradient_by_name.get(name, 0.0), self.gradient)


def estimate_tolerance(reference: RunRecord, reordered: RunRecord | None, update: int) -> Tolerance:
    """Estimate the tolerance for an update from the differences that a changed order of summation causes.

    A default tolerance is returned if `reordered` has not recorded the update, or if reversing the rows of a batch
    changes more than the order of summation.

    Args:
        reference: Run that is assumed to be correct.
        reordered: Run that differs from `reference` only by reversed rows in each batch. None: a default tolerance is
            returned.
        update: Number of the update.
    """
    rounding = max(_ROUNDING.get(each, 0.0) for each in _list_formats(reference))
    # The runs drift apart, because an optimizer such as Adam turns tiny differences of gradients into whole steps.
    floor = max(FLOOR, min(rounding * (1 + _DRIFT * (update - 1)), _CEILING / 5))
    if reordered is None or update not in reordered.rank0_updates or update not in reference.rank0_updates:
        return Tolerance(floor * 5, floor * 50)
    if _is_order_meaningful(reference, reordered):
        return Tolerance(floor * 5, floor * 50)
    difference = compare_update(reference, reordered, update)
    return Tolerance(
        _widen_tolerance(difference.gradient, floor),
        _widen_tolerance(difference.movement, floor * 5),
        {name: _widen_tolerance(value, floor * 5) for name, value in difference.gradient_by_name.items()},
    )


def _list_formats(reference: RunRecord) -> list[str]:
    """Return the number formats of a run: its mixed precision, and the dtypes of its parameters."""
    facts = reference.rank0_facts
    return [facts.mixed_precision, *facts.trainable_dtypes]


def _is_order_meaningful(reference: RunRecord, reordered: RunRecord) -> bool:
    """Whether reversing the rows of a batch changes more than the order of summation.

    This happens if the script combines rows with values that were not reversed. With mixed or lower precision, the
    result is always False, because rounding errors can then be as large as such a change.
    """
    if any(each in _ROUNDING for each in _list_formats(reference)):
        return False
    start = min(reference.rank0_updates)
    return start in reordered.rank0_updates and compare_update(reference, reordered, start).gradient > _MOST_ROUNDING


def _widen_tolerance(difference: float, least: float) -> float:
    """Return the tolerance for a difference that a changed order of summation has caused, between `least` and 0.25."""
    return min(max(_MARGIN * difference, least), _CEILING)


@dataclass(frozen=True)
class RunDifference:
    """First update in which two runs differ by more than the tolerance.

    Attributes:
        difference: Difference in this update.
        tolerance: Tolerance in this update.
        parameters: Names of all parameters that differ, in the order of the model. Empty if only the gradients of all
            parameters together exceed the tolerance.
        is_before_step: Whether the gradients already differ before the optimizer step. False if only the parameters
            differ after it.
    """

    difference: Difference
    tolerance: Tolerance
    parameters: tuple[str, ...]
    is_before_step: bool

    @property
    def first_parameter(self) -> str:
        """Name of the first parameter that differs, in the order of the model; "" if there is none."""
        return self.parameters[0] if self.parameters else ""


class UpdateComparison(NamedTuple):
    """Result of comparing the updates of two runs.

    Attributes:
        first_difference: First difference that exceeds the tolerance, or None.
        num_updates: Number of compared updates. No update after the first difference is compared.
        largest: Largest relative difference of gradients or parameters in these updates.
    """

    first_difference: RunDifference | None
    num_updates: int
    largest: float


def find_first_difference(
    reference: RunRecord, other: RunRecord, reordered: RunRecord | None, first_update: int = 1
) -> UpdateComparison:
    """Compare the updates of two runs, up to the first difference that exceeds the tolerance.

    Args:
        reference: Run that is assumed to be correct.
        other: Run to compare with it.
        reordered: Run with a changed order of summation, from which the tolerance is estimated. None: a default
            tolerance applies.
        first_update: Number of the first update to compare. Default: 1.
    """
    largest, num_updates = 0.0, 0
    for update in sorted(set(reference.rank0_updates) & set(other.rank0_updates)):
        if update < first_update:
            continue
        num_updates += 1
        difference = compare_update(reference, other, update)
        tolerance = estimate_tolerance(reference, reordered, update)
        largest = max(largest, difference.gradient, difference.movement)
        exceeding = _find_exceeding(difference, tolerance)
        if exceeding is not None:
            return UpdateComparison(exceeding, num_updates, largest)
    return UpdateComparison(None, num_updates, largest)


def _find_exceeding(difference: Difference, tolerance: Tolerance) -> RunDifference | None:
    """Return the parameters whose difference in an update exceeds the tolerance, or None if there is no such difference.

    Parameters that have a gradient in only one run come first, then gradients, then values after the optimizer step.
    """
    if difference.one_sided:
        return RunDifference(difference, tolerance, difference.one_sided, is_before_step=True)
    # Gradients that are not finite have a difference of NaN. `not <=` is true for NaN, unlike `>`.
    if not difference.gradient <= tolerance.gradient:
        names = tuple(
            name
            for name, value in difference.gradient_by_name.items()
            if not value <= tolerance.get_gradient_limit(name)
        )
        return RunDifference(difference, tolerance, names, is_before_step=True)
    # A difference of gradients within the tolerance also moves the parameters. Only much larger shifts are reported.
    if difference.movement > tolerance.movement and difference.movement > 50 * difference.gradient:
        names = tuple(name for name, value in difference.movement_by_name.items() if value > tolerance.movement)
        return RunDifference(difference, tolerance, names, is_before_step=False)
    return None
