"""Schedule of a moving average: the updates after which it takes an averaging step, and the decay of each step."""

import math
from collections.abc import Callable
from typing import Any

from headway.errors import ConfigError
from headway.extras.power_average import PowerDecay

Decay = float | str | Callable[[int], float]
"""Decay of an average: a number, "mean", or a function of the number of the averaging step, which begins at 1."""


class AveragingSchedule:
    """Schedule of a moving average, which counts the updates of the model and the averaging steps.

    After `update_after` updates, the average becomes a copy of the weights. From then on, every `every` updates, an
    averaging step combines the average with the weights.

    Args:
        decay: Weight of the old average in each averaging step: a number from 0 to 1, or a function that returns such a
            number for the number of the step, which begins at 1. "mean": the mean of the weights at all averaging steps.
        update_after: Number of updates after which averaging begins.
        every: Number of updates from one averaging step to the next.
        has_warmup: Whether the decay of step n is at most (1 + n) / (10 + n). Allowed only if `decay` is a number.

    Attributes:
        decay: Weight of the old average, as the user gave it.
        update_after: Number of updates after which averaging begins.
        every: Number of updates from one averaging step to the next.
        num_updates: Number of updates of the model since the average was created.
        num_averaged: Number of averaging steps so far. The initial copy does not count.

    Raises:
        ConfigError: If an argument is not allowed.
    """

    def __init__(self, decay: Decay, update_after: int, every: int, has_warmup: bool) -> None:
        _check_decay(decay, has_warmup)
        _check_count("update_after", update_after, 0)
        _check_count("every", every, 1)
        self.decay = decay
        self.update_after = update_after
        self.every = every
        self.num_updates = 0
        self.num_averaged = 0
        self._has_warmup = has_warmup

    @property
    def has_begun(self) -> bool:
        """Whether averaging has begun. Before that, the average equals the weights."""
        return self.num_updates >= self.update_after

    def count_update(self) -> float | None:
        """Count one update of the model.

        Returns:
            Weight of the old average in the averaging step that follows this update. 0 if the average becomes a copy of
            the current weights. None if the average does not change.

        Raises:
            ConfigError: If the function for the decay returns something other than a number from 0 to 1.
        """
        self.num_updates += 1
        num_since_begin = self.num_updates - self.update_after
        if num_since_begin == 0:
            return 0.0
        if num_since_begin < 0 or num_since_begin % self.every:
            return None
        self.num_averaged += 1
        return self._compute_decay(self.num_averaged)

    def _compute_decay(self, number: int) -> float:
        """Return the decay of an averaging step.

        Args:
            number: Number of the step, 1 for the first.

        Raises:
            ConfigError: If the function for the decay returns something other than a number from 0 to 1.
        """
        if self.decay == "mean":
            return (number - 1) / number
        if callable(self.decay):
            decay = float(self.decay(number))
            if not 0 <= decay <= 1:
                raise ConfigError(f"the function for the decay returned {decay!r} for step {number}; allowed: 0 to 1")
            return decay
        decay = float(self.decay)
        return min(decay, (1 + number) / (10 + number)) if self._has_warmup else decay

    def describe_profile(self) -> dict[str, Any]:
        """Return the settings that determine the weights of a `PowerDecay`, or an empty dict for other decays.

        The keys are `sigma_rel` (width of the profile, relative to the length of the training), `update_after` and `every`.
        """
        if not isinstance(self.decay, PowerDecay):
            return {}
        return {"sigma_rel": float(self.decay.sigma_rel), "update_after": self.update_after, "every": self.every}


def _check_decay(decay: Any, has_warmup: bool) -> None:
    """Raise `ConfigError` if the decay of an average is not allowed, or cannot be combined with a warm-up."""
    if isinstance(decay, str) and decay != "mean":
        raise ConfigError(f"decay={decay!r}; allowed: a number from 0 to 1, 'mean', or a function of the step's number")
    if not callable(decay) and not isinstance(decay, str):
        is_number = isinstance(decay, int | float) and not isinstance(decay, bool) and math.isfinite(decay)
        if not is_number or not 0 <= decay <= 1:
            raise ConfigError(f"decay={decay!r}; give a number from 0 to 1, such as 0.999, 'mean' or a function")
    if has_warmup and (callable(decay) or isinstance(decay, str)):
        raise ConfigError("warmup=True needs a number as decay; let your function return the decay of each step itself")


def _check_count(name: str, value: Any, minimum: int) -> None:
    """Raise `ConfigError` unless an argument is an integer of at least `minimum`. True and False are no integers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name}={value!r}; give a number of updates, {minimum} or more")
