"""Comparison of two runs: how much gradients and parameters differ in each update, and where they first differ.

Differences of gradients are relative to the gradients. Differences of parameters are relative to the distance that the
parameters have moved since the start. The tolerance comes from a run that reverses the rows of each batch, which
usually changes only the order of summation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from headway.verify.records import RunRecord, UpdateRecord

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

    Attributes:
        update: Number of the update.
        gradient: Norm of the difference of all gradients, relative to the norm of the gradients.
        movement: Norm of the difference of all parameters, relative to the distance that they have moved so far.
        by_name: Difference of each parameter's gradient, relative to the norm of that gradient, by parameter name.
        values_by_name: Difference of each parameter's value, relative to the distance that it has moved so far, by
            parameter name.
        factor: Factor by which the reference's gradients must be multiplied to fit the other run's gradients best, by
            least squares.
        residual: Relative difference that remains between the multiplied gradients and the other run's gradients.
        one_sided: Names of the parameters that have a gradient in only one of the runs, or gradients of other shapes.
    """

    update: int
    gradient: float
    movement: float
    by_name: dict[str, float] = field(default_factory=dict)
    values_by_name: dict[str, float] = field(default_factory=dict)
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
    one_sided = tuple(name for name in {**ours, **theirs} if name not in names)
    square = sum(float(ours[name] @ ours[name]) for name in names)
    apart = sum(_sum_squares(theirs[name] - ours[name]) for name in names)
    product = sum(float(ours[name] @ theirs[name]) for name in names)
    factor = product / square if square else 1.0
    size = square**0.5
    rest = sum(_sum_squares(theirs[name] - factor * ours[name]) for name in names)
    # Much smaller gradients than the average are compared with this floor, because they consist of rounding errors.
    least = 1e-3 * size / max(1, len(names)) ** 0.5
    by_name = {
        name: _sum_squares(theirs[name] - ours[name]) ** 0.5 / max(_sum_squares(ours[name]) ** 0.5, least, 1e-30)
        for name in names
    }
    before, after, now = reference.values(0), reference.values(update), other.values(update)
    moved = {name: _sum_squares(after[name] - before[name]) for name in after if name in before and name in now}
    total = sum(moved.values())
    gaps = {name: _sum_squares(now[name] - after[name]) for name in moved if now[name].shape == after[name].shape}
    floor = 1e-3 * (total / max(1, len(moved))) ** 0.5
    return Difference(
        update=update,
        gradient=apart**0.5 / size if size else float(bool(apart)),
        movement=(sum(gaps.values()) / total) ** 0.5 if total else float(bool(sum(gaps.values()))),
        by_name=by_name,
        values_by_name={name: gap**0.5 / max(moved[name] ** 0.5, floor, 1e-30) for name, gap in gaps.items()},
        factor=factor,
        residual=rest**0.5 / max(size * abs(factor), 1e-30),
        one_sided=one_sided,
    )


def are_equal(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two runs have recorded the same numbers. NaN counts as equal to NaN."""
    return numpy.array_equal(numpy.asarray(ours), numpy.asarray(theirs), equal_nan=True)


def find_other_norms(ours: UpdateRecord, theirs: UpdateRecord) -> list[str]:
    """Return the names of the parameters whose gradient norms differ between two runs. NaN counts as equal to NaN."""
    return [
        name
        for name, norm in ours.norms.items()
        if name not in theirs.norms or not are_equal([norm], [theirs.norms[name]])
    ]


def _sum_squares(values: Any) -> float:
    finite = numpy.nan_to_num(values, nan=1e30, posinf=1e30, neginf=-1e30)
    return float(finite @ finite)


@dataclass(frozen=True)
class Tolerance:
    """Largest differences in one update that are attributed to the order of summation.

    Attributes:
        gradient: Limit for `Difference.gradient`.
        movement: Limit for `Difference.movement`.
        by_name: Limit for each parameter in `Difference.by_name`.
    """

    gradient: float = FLOOR
    movement: float = FLOOR
    by_name: Mapping[str, float] = field(default_factory=dict)


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
    if reordered is None or update not in reordered.first or update not in reference.first:
        return Tolerance(floor * 5, floor * 50)
    if _is_order_meaningful(reference, reordered):
        return Tolerance(floor * 5, floor * 50)
    seen = compare_update(reference, reordered, update)
    return Tolerance(
        _widen_tolerance(seen.gradient, floor),
        _widen_tolerance(seen.movement, floor * 5),
        {name: _widen_tolerance(value, floor * 5) for name, value in seen.by_name.items()},
    )


def _list_formats(reference: RunRecord) -> list[str]:
    """Return the number formats of a run: its mixed precision, and the dtypes of its parameters."""
    return [reference.fact.get("mixed_precision", "no"), *reference.fact.get("dtypes", ())]


def _is_order_meaningful(reference: RunRecord, reordered: RunRecord) -> bool:
    """Whether reversing the rows of a batch changes more than the order of summation.

    This happens if the script combines rows with values that were not reversed. With mixed or lower precision, the
    result is always False, because rounding errors can then be as large as such a change.
    """
    if any(each in _ROUNDING for each in _list_formats(reference)):
        return False
    start = min(reference.first)
    return start in reordered.first and compare_update(reference, reordered, start).gradient > _MOST_ROUNDING


def _widen_tolerance(value: float, least: float) -> float:
    return min(max(_MARGIN * value, least), _CEILING)


@dataclass(frozen=True)
class RunDifference:
    """First update in which two runs differ by more than the tolerance.

    Attributes:
        difference: Difference in this update.
        tolerance: Tolerance in this update.
        parameter: Name of the first parameter that differs, in the order of the model; "" if there is none.
        others: Names of all parameters that differ.
        is_before_step: Whether the gradients already differ before the optimizer step. False if only the parameters
            differ after it.
    """

    difference: Difference
    tolerance: Tolerance
    parameter: str
    others: tuple[str, ...]
    is_before_step: bool


def find_first_difference(
    reference: RunRecord, other: RunRecord, reordered: RunRecord | None, first: int = 1
) -> tuple[RunDifference | None, int, float]:
    """Find the first difference between two runs that exceeds the tolerance.

    Args:
        reference: Run that is assumed to be correct.
        other: Run to compare with it.
        reordered: Run with a changed order of summation, from which the tolerance is estimated. None: a default
            tolerance applies.
        first: Number of the first update to compare. Default: 1.

    Returns:
        Tuple of (first difference or None, number of compared updates, largest relative difference in these updates).
        No update after the first difference is compared.
    """
    largest, num = 0.0, 0
    for update in sorted(set(reference.first) & set(other.first)):
        if update < first:
            continue
        num += 1
        found = compare_update(reference, other, update)
        allowed = estimate_tolerance(reference, reordered, update)
        largest = max(largest, found.gradient, found.movement)
        if found.one_sided:
            return RunDifference(found, allowed, found.one_sided[0], found.one_sided, True), num, largest
        if not found.gradient <= allowed.gradient:  # also true for NaN, the difference of gradients that are not finite
            bad = [name for name, value in found.by_name.items() if not value <= _get_tolerance(allowed, name)]
            return RunDifference(found, allowed, bad[0] if bad else "", tuple(bad), True), num, largest
        if found.movement > allowed.movement and found.movement > 50 * found.gradient:
            bad = [name for name, value in found.values_by_name.items() if value > allowed.movement]
            return RunDifference(found, allowed, bad[0] if bad else "", tuple(bad), False), num, largest
    return None, num, largest


def _get_tolerance(allowed: Tolerance, name: str) -> float:
    return max(allowed.by_name.get(name, 0.0), allowed.gradient)


# -------------------------------------------------------------------- samples


def count_samples(record: RunRecord, update: int, key: str) -> Counter[Any]:
    """Return how often each sample was trained on in an update. Ranks that share a data shard are counted once.

    Args:
        record: Records of the run.
        update: Number of the update.
        key: Property by which samples are recognized: "rows" (hash of the contents), "loose" (hash without padding) or
            "indices" (index in the dataset).
    """
    counts: Counter[Any] = Counter()
    seen_shards = set()
    for facts, updates in zip(record.facts, record.updates, strict=False):
        shard = facts["shard"][0]
        if shard in seen_shards or update not in updates:
            continue
        seen_shards.add(shard)
        for batch in updates[update].batches:
            counts.update(batch.get(key) or ())
    return counts


def count_rows(record: RunRecord, update: int) -> int:
    """Return the number of samples in an update, over all data shards."""
    return sum(count_samples(record, update, "rows").values())
