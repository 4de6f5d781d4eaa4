"""Learning-rate schedules of a Trainer, under the names that transformers uses."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from headway.errors import ConfigError
from headway.log import get_logger
from headway.trainer.arguments import TrainingArguments
from headway.trainer.schedule_free import has_modes

log = get_logger(__name__)

_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the total number of updates."""

_CONSTANT = ("constant", "constant_with_warmup")
"""Schedules that do not change the learning rate after the warm-up."""

# Each function below is a schedule: from the number of completed updates, it computes a factor on the learning rate.
# `LearningRateFactor` adds the warm-up. Do not rename their keyword arguments, because checkpoints contain these names,
# and a prepared scheduler reads its length from `num_training_steps`.


def _compute_progress(update: int, num_warmup_steps: int, num_training_steps: int) -> float:
    """Return the completed fraction of the updates after the warm-up. It exceeds 1 after the last update."""
    return (update - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _compute_linear(update: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Return a factor that falls linearly to 0 at the last update."""
    return 1.0 - min(1.0, _compute_progress(update, num_warmup_steps, num_training_steps))


def _compute_cosine(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0
) -> float:
    """Return a factor that follows `num_cycles` cosine waves. With the default, it falls from 1 to `min_lr_rate`."""
    progress = _compute_progress(update, num_warmup_steps, num_training_steps)
    return max(0.0, _compute_half_wave(num_cycles * 2.0 * progress) * (1 - min_lr_rate) + min_lr_rate)


def _compute_half_wave(position: float) -> float:
    """Return a cosine that falls from 1 to 0 while `position` goes from 0 to 1, and rises to 1 again at 2."""
    return 0.5 * (1.0 + math.cos(math.pi * position))


def _compute_cosine_with_restarts(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1
) -> float:
    """Return a factor that falls from 1 to 0 along half a cosine, `num_cycles` times."""
    progress = _compute_progress(update, num_warmup_steps, num_training_steps)
    return 0.0 if progress >= 1 else max(0.0, _compute_half_wave((num_cycles * progress) % 1.0))


def _compute_polynomial(
    update: int, *, num_warmup_steps: int, num_training_steps: int, power: float = 1.0, end_share: float = 0.0
) -> float:
    """Return a factor that falls to `end_share` at the last update, with a power of the remaining fraction."""
    remaining = 1.0 - min(1.0, _compute_progress(update, num_warmup_steps, num_training_steps))
    return float((1.0 - end_share) * remaining**power + end_share)


def _compute_constant(update: int, *, num_warmup_steps: int) -> float:
    """Return 1: the learning rate does not change after the warm-up."""
    return 1.0


def _compute_inverse_sqrt(update: int, *, num_warmup_steps: int, timescale: int | None = None) -> float:
    """Return a factor that falls with the inverse square root of the updates after the warm-up.

    After t of these updates, it is 1 / sqrt(1 + t / timescale): 1 at the end of the warm-up, 0.71 after `timescale`.

    Args:
        update: Number of completed updates, including those of the warm-up. At least `num_warmup_steps`.
        num_warmup_steps: Number of updates of the warm-up.
        timescale: Number of updates. None (the default): `num_warmup_steps`, or 10,000 if there is no warm-up.
    """
    scale = timescale or num_warmup_steps or 10_000
    return 1.0 / math.sqrt((update + scale - num_warmup_steps) / scale)


def _compute_warmup_stable_decay(
    update: int, *, num_warmup_steps: int, num_training_steps: int, num_decay_steps: int, min_lr_ratio: float = 0.0
) -> float:
    """Return the factor of a schedule that warms up, stays constant, and decays along half a cosine at the end.

    The warm-up starts at the lowest learning rate. (Hu et al., MiniCPM, 2024)

    Args:
        update: Number of completed updates.
        num_warmup_steps: Number of updates of the warm-up.
        num_training_steps: Total number of updates.
        num_decay_steps: Number of updates of the decay.
        min_lr_ratio: Lowest learning rate as a fraction of the peak. Default: 0.
    """
    decay_progress = (update - (num_training_steps - num_decay_steps)) / max(1, num_decay_steps)
    return _compute_half_wave(min(1.0, max(0.0, decay_progress))) * (1 - min_lr_ratio) + min_lr_ratio


SCHEDULES: dict[str, Callable[..., float] | None] = {
    "linear": _compute_linear,
    "cosine": _compute_cosine,
    "cosine_with_restarts": _compute_cosine_with_restarts,
    "cosine_with_min_lr": _compute_cosine,
    "polynomial": _compute_polynomial,
    "constant": _compute_constant,
    "constant_with_warmup": _compute_constant,
    "inverse_sqrt": _compute_inverse_sqrt,
    "warmup_stable_decay": _compute_warmup_stable_decay,
    "reduce_lr_on_plateau": None,
}
"""Schedules by name. Each is a function that returns a factor on the learning rate for the number of completed updates.

None: the schedule depends on a metric.
"""


class LearningRateFactor:
    """Callable that returns the factor of the learning rate after a given number of updates. It includes the warm-up.

    It is an object instead of a function, so that the state dict of a scheduler contains these settings.

    Args:
        function: Function of the number of completed updates, called after the warm-up.
        settings: Keyword arguments of the function. They include `num_warmup_steps`.

    Raises:
        TypeError: If the function does not accept the settings, or requires others.
    """

    # `_function` is a slot, so that `vars()`, which LambdaLR puts into its state dict, contains only the settings.
    __slots__ = ("__dict__", "_function")

    def __init__(self, function: Callable[..., float], **settings: Any) -> None:
        signature(function).bind(0, **settings)  # a wrong keyword raises an error now, not after the warm-up
        self._function = function
        vars(self).update(settings)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the schedule's function, by name."""
        return vars(self)

    def __call__(self, update: int) -> float:
        """Return the factor of the learning rate after the given number of updates."""
        settings = vars(self)
        if update < settings["num_warmup_steps"]:
            lowest = float(settings.get("min_lr_ratio", 0.0))
            return update / float(settings["num_warmup_steps"]) * (1 - lowest) + lowest
        return self._function(update, **settings)


def create_schedule(optimizer: torch.optim.Optimizer, args: TrainingArguments, num_updates: int) -> Any:
    """Create the learning-rate schedule whose name is in the arguments. It must be stepped once per update.

    The exception is ReduceLROnPlateau, which must be stepped once per evaluation, with the metric. A schedule-free
    optimizer with a schedule that changes the learning rate after the warm-up causes a warning.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        args: Training arguments with the schedule's name and settings.
        num_updates: Number of updates of the training run.

    Raises:
        ConfigError: If the schedule does not accept a setting, or requires one that is missing.
    """
    name, settings = args.lr_scheduler_type, dict(args.lr_scheduler_kwargs or {})
    function = SCHEDULES[name]
    if has_modes(optimizer) and name not in _CONSTANT:
        log.warning_once(
            "%s is schedule-free: it averages weights instead of lowering the learning rate, and "
            "lr_scheduler_type=%r lowers it, too. "
            "Set lr_scheduler_type='constant', or 'constant_with_warmup'",
            type(optimizer).__name__,
            name,
        )
    # A class or an optimizer that was given to the Trainer has a learning rate of its own.
    peak = float(optimizer.defaults.get("lr", args.learning_rate)) or 1.0
    try:
        if function is None:
            settings.setdefault("mode", "max" if args.greater_is_better else "min")
            return ReduceLROnPlateau(optimizer, **settings)
        if name == "polynomial":
            settings["end_share"] = settings.pop("lr_end", 1e-7) / peak
        if name == "cosine_with_min_lr" and "min_lr" in settings:
            settings["min_lr_rate"] = settings.pop("min_lr") / peak
        return LambdaLR(optimizer, LearningRateFactor(function, **_choose_lengths(args, num_updates), **settings))
    except TypeError as error:
        raise ConfigError(f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} does not fit {name}: {error}") from error


def stretch_schedule(schedule: Any, args: TrainingArguments, num_updates: int) -> None:
    """Set the total number of updates of a schedule from `create_schedule`, and the length of its warm-up accordingly.

    Schedules that were not created by it are left unchanged, and so is ReduceLROnPlateau.

    Args:
        schedule: Schedule to change.
        args: Training arguments that define the schedule's warm-up.
        num_updates: New number of updates of the training run.
    """
    for each in getattr(schedule, "lr_lambdas", ()):
        if isinstance(each, LearningRateFactor):
            each.keywords.update(_choose_lengths(args, num_updates))


def _choose_lengths(args: TrainingArguments, num_updates: int) -> dict[str, int]:
    """Return the schedule's settings that depend on the number of updates."""
    name = args.lr_scheduler_type
    lengths = {"num_warmup_steps": 0 if name == "constant" else args.get_warmup_steps(num_updates)}
    if name not in _WITHOUT_LENGTH:
        lengths["num_training_steps"] = num_updates
    return lengths
