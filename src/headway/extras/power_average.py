"""Power-function averages, and the combination of several into the average of another width (post-hoc EMA).

After t averaging steps, a power-function average weights the state of step k in proportion to the integral of
`tau ** gamma` from k - 1 to k. The profile of these weights over the steps therefore stretches with the run. Its
relative width `sigma_rel` is the standard deviation of the step number under these weights, divided by t. See Karras et
al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (2023), section 3.1 and appendix C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.errors import ConfigError

MAX_WIDTH = 1 / math.sqrt(12)
"""Relative width of the average in which all states have the same weight (gamma = 0)."""


@dataclass(frozen=True)
class PowerDecay:
    """Decay of a power-function average, for `ExponentialMovingAverage(model, decay=PowerDecay(0.05))`.

    The average covers a constant fraction of the run (Karras et al. 2023, arXiv 2312.02696). Each averaging step's state
    has a weight, and after t steps, the standard deviation of the step number under these weights is `sigma_rel` * t.
    The states from before the first averaging step have no weight. `headway.reconstruct_average` combines snapshots of
    such averages into an average of another width.

    Args:
        sigma_rel: Relative width, more than 0 and at most 0.2886. Typical widths are 0.05 and 0.1. At the largest
            width, all averaged states have the same weight.

    Attributes:
        sigma_rel: Relative width.

    Raises:
        ConfigError: If the width is not allowed.

    Example::

        averages = [ExponentialMovingAverage(model, PowerDecay(width), name=f"ema_{width}") for width in (0.05, 0.1)]
    """

    sigma_rel: float

    def __post_init__(self) -> None:
        check_width(self.sigma_rel)

    @property
    def gamma(self) -> float:
        """Exponent of the power function, `tau ** gamma`, that gives the weights of the averaged states."""
        return compute_exponent(self.sigma_rel)

    def __call__(self, number: int) -> float:
        """Return the weight of the old average in an averaging step.

        Args:
            number: Number of the averaging step, 1 for the first.
        """
        return float((1 - 1 / number) ** (self.gamma + 1))


@dataclass(frozen=True)
class Profile:
    """Weights of the averaged states in a power-function average, by the number of the averaging step.

    Attributes:
        sigma_rel: Relative width: standard deviation of the step number under these weights, divided by `num_averaged`.
        num_averaged: Number of averaging steps.
    """

    sigma_rel: float
    num_averaged: int


def check_width(sigma_rel: object) -> None:
    """Raise an error unless a relative width is allowed.

    Raises:
        ConfigError: If the width is not a number, not positive, or larger than the maximum of 0.2886.
    """
    is_number = isinstance(sigma_rel, int | float) and not isinstance(sigma_rel, bool)
    if not is_number or not 0 < sigma_rel <= MAX_WIDTH:  # type: ignore[operator]
        raise ConfigError(
            f"sigma_rel={sigma_rel!r}; give a relative width of more than 0 and at most 0.2886, such as 0.1"
        )


def compute_exponent(sigma_rel: float) -> float:
    """Return the exponent gamma of the power function that has a given relative width, found by bisection.

    The width decreases with the exponent: sigma_rel = sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2).
    """
    low, high = 0.0, 1 / sigma_rel  # the width is less than 1 / (gamma + 2)
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return low
        is_wider = math.sqrt((middle + 1) / (middle + 3)) / (middle + 2) > sigma_rel
        low, high = (middle, high) if is_wider else (low, middle)


def solve_coefficients(profiles: Sequence[Profile], target: Profile) -> tuple[list[float], float]:
    """Return the coefficients that combine averages into another one, and the error of the combination.

    The coefficients minimize the L2 distance between the profiles, and their sum is 1. The difference `r` between the
    profiles then has the integral 0. By the Cauchy-Schwarz inequality, no averaged weight of the model differs from its
    exact average by more than the L2 norm of `r`, times sqrt(t), times the standard deviation of the model's weight
    over the target's t averaging steps.

    Args:
        profiles: Profiles of the averages. No two are equal, and none has more averaging steps than the target.
        target: Profile to approximate.

    Returns:
        Pair of (coefficient of each average, L2 norm of the difference times sqrt(t)).
    """
    products = _multiply_profiles(profiles, profiles)
    target_products = _multiply_profiles(profiles, [target])[:, 0]
    # Profiles of early snapshots have much larger norms. Without the scale, the system would be ill-conditioned.
    scale = products.diagonal().rsqrt()
    count = len(profiles)
    system = torch.zeros(count + 1, count + 1, dtype=torch.float64)
    system[:count, :count] = products * scale[:, None] * scale
    system[count, :count] = system[:count, count] = scale / scale.max()  # Lagrange multiplier: the sum must be 1
    right = torch.cat([target_products * scale, (1 / scale.max())[None]])
    coefficients = torch.linalg.solve(system, right)[:count] * scale
    norm = _multiply_profiles([target], [target])[0, 0]
    squared = norm - 2 * (coefficients @ target_products) + coefficients @ products @ coefficients
    return coefficients.tolist(), math.sqrt(max(0.0, float(squared)) * target.num_averaged)


def _multiply_profiles(row_profiles: Sequence[Profile], column_profiles: Sequence[Profile]) -> torch.Tensor:
    """Return the inner products of profiles as a float64 matrix, one row and one column per profile.

    For t averaging steps and exponent g, the profile is (g + 1) / t * (tau / t) ** g for tau from 0 to t.
    """

    def list_values(profiles: Sequence[Profile]) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.tensor([each.num_averaged for each in profiles], dtype=torch.float64)
        exponents = torch.tensor([compute_exponent(each.sigma_rel) for each in profiles], dtype=torch.float64)
        return steps, exponents

    # For steps t <= T and exponents g and G, the integral is (g + 1) * (G + 1) * (t / T) ** G / ((g + G + 1) * T).
    row_steps, row_exponents = (each[:, None] for each in list_values(row_profiles))
    column_steps, column_exponents = (each[None, :] for each in list_values(column_profiles))
    longer_steps = torch.maximum(row_steps, column_steps)
    longer_exponents = torch.where(row_steps < column_steps, column_exponents, row_exponents)
    ratio = (torch.minimum(row_steps, column_steps) / longer_steps) ** longer_exponents
    factors = (row_exponents + 1) * (column_exponents + 1)
    return factors * ratio / ((row_exponents + column_exponents + 1) * longer_steps)
