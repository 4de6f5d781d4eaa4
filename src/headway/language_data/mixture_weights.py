"""Weights of a mixture's sources: checks, conversion to exact fractions, and schedules by update."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

from headway.errors import ConfigError
from headway.language_data.quotas import LARGEST_BLOCK, WeightRange, build_weight_ranges

Weights = Mapping[str, float] | Sequence[float]
"""Weight of each source, by its name or in the order of the sources."""


def read_weights(
    weights: Weights | Mapping[int, Weights], names: Sequence[str], samples_per_update: int | None
) -> list[WeightRange]:
    """Convert the weights of a mixture to ranges of positions (`WeightRange`) in which they are constant.

    A position is the place of one sample in the mixture's order.

    Args:
        weights: Weight of each source: a dict by name, or a sequence in the order of `names`. If the weights change
            during training, a dict from the number of an update to the weights from that update on.
        names: Names of the sources.
        samples_per_update: Number of samples per update over all ranks. None is allowed only if the weights do not
            change.

    Raises:
        ConfigError: If a weight is not a finite number of 0 or more, if all are 0, or if they do not match `names`.
            Also if a positive weight is below 1 / `LARGEST_BLOCK` of their sum, if the first update of a schedule is
            not 0, or if a schedule is given without a positive `samples_per_update`.
    """
    if not _is_schedule(weights):
        return build_weight_ranges([0], [_normalize_weights(weights, names)])
    by_update: dict[int, Any] = dict(weights)  # type: ignore[arg-type]
    updates = sorted(by_update)
    if updates[0] != 0:
        raise ConfigError(
            f"weights by update begin at update {updates[0]}; the first must be 0, so that every update has weights"
        )
    if isinstance(samples_per_update, bool) or not isinstance(samples_per_update, int) or samples_per_update < 1:
        raise ConfigError(
            f"weights by update need samples_per_update, the samples of one update over all ranks, and it is {samples_per_update!r}; "
            "pass batch size per rank * ranks * accumulation steps"
        )
    starts = [update * samples_per_update for update in updates]
    return build_weight_ranges(starts, [_normalize_weights(by_update[update], names) for update in updates])


def _is_schedule(weights: Any) -> bool:
    """Whether weights are a dict from numbers of updates to weights.

    Raises:
        ConfigError: If only some keys are numbers of updates, or a number is negative.
    """
    if not isinstance(weights, Mapping) or not weights:
        return False
    are_updates = [isinstance(key, int) and not isinstance(key, bool) for key in weights]
    if any(are_updates) and (not all(are_updates) or min(weights) < 0):
        raise ConfigError(
            f"weights= has the keys {list(weights)}; give weights by the names of the sources, or by the numbers of updates from 0"
        )
    return all(are_updates)


def _normalize_weights(weights: Any, names: Sequence[str]) -> list[Fraction]:
    """Return the weights as fractions that add up to 1, in the order of the sources.

    Raises:
        ConfigError: If a weight is invalid or too small, or if all weights are 0.
    """
    values = [_read_weight(value, name) for name, value in zip(names, _order_weights(weights, names))]
    total = sum(values)
    if not total:
        raise ConfigError(f"the weights of all sources ({', '.join(names)}) are 0; give at least one a positive weight")
    shares = [value / total for value in values]
    for name, share in zip(names, shares):
        if 0 < share * LARGEST_BLOCK < 1:
            raise ConfigError(
                f"source {name!r} has the share {float(share):.2e}, and the smallest is one sample in {LARGEST_BLOCK}; give it a "
                "larger weight, or 0"
            )
    return shares


def _order_weights(weights: Any, names: Sequence[str]) -> list[Any]:
    """Return the weights as given, in the order of the sources.

    Raises:
        ConfigError: If the weights do not match the names of the sources, or their number.
    """
    if isinstance(weights, Mapping):
        unknown, missing = [key for key in weights if key not in names], [key for key in names if key not in weights]
        if unknown or missing:
            raise ConfigError(
                f"weights= has the names {list(weights)}, and the sources are {list(names)}; give each source one weight"
            )
        return [weights[name] for name in names]
    try:
        values = list(weights)
    except TypeError:
        raise ConfigError(f"weights={weights!r}; give a dict by name, or one number per source") from None
    if len(values) != len(names):
        raise ConfigError(f"weights= has {len(values)} numbers for {len(names)} sources; give each source one weight")
    return values


def _read_weight(value: Any, name: str) -> Fraction:
    """Return one weight as an exact fraction.

    Raises:
        ConfigError: If it is not a finite number of 0 or more.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not isfinite(number) or number < 0:
        raise ConfigError(f"the weight of source {name!r} is {value!r}; give a finite number, 0 or more")
    if isinstance(value, Fraction | int):
        return Fraction(value)
    # repr() gives a float as the user wrote it, so that 0.1 becomes exactly one tenth.
    return Fraction(repr(number))
