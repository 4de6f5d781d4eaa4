"""Checks that warn of learning rate schedules that end before the run does, because their length was counted wrongly.

A schedule's length is a number of scheduler steps. One update can advance a schedule by several steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim.lr_scheduler import ConstantLR, LinearLR

from headway.core.data.loader import PreparedLoader
from headway.log import get_logger

log = get_logger(__name__)

_NEARLY_ZERO = 1e-3
"""Fraction of its initial value below which a learning rate is too small for updates to have an effect."""


class _Rule(Protocol):
    """Rule for the number of scheduler steps per update (`SchedulerStepRule`, which imports this module)."""

    def ticks(self, window_length: int) -> int:
        """Return the number of scheduler steps for one update of `window_length` micro-batches."""


def get_schedule_length(scheduler: Any) -> int | None:
    """Return the number of scheduler steps after which a schedule ends, or None if the schedule does not expose it.

    Schedules of torch and transformers expose it, and so do schedules that combine them.
    """
    for name in ("total_steps", "T_max", "total_iters"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int):
            return value
    # transformers' schedules are LambdaLR over functools.partial objects that carry their length.
    for function in getattr(scheduler, "lr_lambdas", None) or ():
        length = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(length, int):
            return length
    return _get_combined_length(scheduler, get_schedule_length)


def get_decay_length(scheduler: Any) -> int | None:
    """Return the length in scheduler steps of a schedule that decays to a low learning rate.

    Return None if the schedule does not expose its length, or if it is a warm-up, which ends at the full rate.
    """
    is_rising = isinstance(scheduler, LinearLR) and scheduler.end_factor >= scheduler.start_factor
    if isinstance(scheduler, ConstantLR) or is_rising:
        return None
    if getattr(scheduler, "_schedulers", None):
        return _get_combined_length(scheduler, get_decay_length)
    return get_schedule_length(scheduler)


def _get_combined_length(scheduler: Any, measure: Callable[[Any], int | None]) -> int | None:
    """Return the length of a schedule that consists of others (SequentialLR, ChainedScheduler), or None if unknown.

    Args:
        scheduler: Any schedule.
        measure: Function that returns the length of one of the inner schedules, or None if unknown.
    """
    children = getattr(scheduler, "_schedulers", None)
    if not children:
        return None
    milestones = getattr(scheduler, "_milestones", None)
    if milestones:  # SequentialLR: the last schedule begins at the last milestone
        last_length = measure(children[-1])
        return None if last_length is None else int(milestones[-1]) + last_length
    lengths = [measure(each) for each in children]  # ChainedScheduler: all of them run at once
    return max((length for length in lengths if length is not None), default=None)


def warn_if_prepared_length_is_doubtful(
    scheduler: Any, rule: _Rule, num_parts: int, num_steps: int, loaders: Sequence[PreparedLoader]
) -> bool:
    """Warn if a schedule's length was probably computed with `len()` of a prepared loader.

    Such a length is a whole number of epochs in the loader's own updates. With several scheduler steps per update, the
    schedule would end in the middle of an epoch. Only loaders whose `len()` was called after they were prepared are
    considered.

    Args:
        scheduler: Schedule of the user, about to be prepared.
        rule: Rule for the number of scheduler steps per update.
        num_parts: Number of ranks among which the batches are divided; 1 if each batch is split among ranks instead.
        num_steps: Micro-batches per update.
        loaders: Loaders that have been prepared.

    Returns:
        Whether the length is doubtful. The log shows the warning once per process.
    """
    length, ticks = get_decay_length(scheduler), rule.ticks(num_steps)
    if not length or ticks == 1:
        return False
    all_num_batches = [loader.count_batches() for loader in loaders]
    for num_batches in all_num_batches:
        if num_batches > num_steps and _does_single_process_length_fit(length, num_batches, num_parts, num_steps):
            return False
    for loader, num_batches in zip(loaders, all_num_batches):
        if num_batches <= num_steps:
            continue
        num_updates = -(-num_batches // num_steps)
        counts_own_updates = length % num_updates == 0 or _is_multiple(length * num_steps, num_batches, num_steps)
        if not (loader.was_len_called and counts_own_updates):
            continue
        last_update = -(-length // ticks)
        log.warning_once(
            "%s ends after %d updates, in the middle of an epoch of %d: it has %d ticks and makes %d an update, one for each "
            "update of the single-process loop. Its length fits %g epochs of the prepared loader, whose updates are those of all "
            "processes together. If it was computed from that loader, multiply it by accelerator.num_data_shards, compute it before "
            "prepare(), or pass Accelerator(scheduler_ticks='updates') (docs/schedules.md)",
            type(scheduler).__name__,
            last_update,
            num_updates,
            length,
            ticks,
            round(length * num_steps / num_batches, 2),
        )
        return True
    return False


def _is_multiple(length: int, epoch_length: int, slack: int) -> bool:
    """Whether a schedule's length is a whole number of epochs, up to a remainder lost in the script's floor division.

    Args:
        length: Length of the schedule in micro-batches.
        epoch_length: Length of an epoch in micro-batches.
        slack: Number of micro-batches that the lost remainder must stay below.
    """
    return -length % epoch_length < slack


def _does_single_process_length_fit(length: int, num_batches: int, num_parts: int, num_steps: int) -> bool:
    """Whether a schedule ends together with an epoch, if its length counts the updates of a loop on a single process.

    If a loader returns n batches to each of P ranks, a single process would read between (n - 1) P + 1 and n P batches.
    A schedule over E epochs can therefore have any length in a range.

    Args:
        length: Length of the schedule in scheduler steps.
        num_batches: Batches per epoch on each rank (n).
        num_parts: Number of ranks among which the batches are divided (P).
        num_steps: Micro-batches per update.
    """
    if length % (-(-num_batches // num_steps) * num_parts) == 0:
        return True
    most_updates = -(-num_batches * num_parts // num_steps)
    fewest_updates = ((num_batches - 1) * num_parts + 1) // num_steps
    num_epochs = -(-length // most_updates)
    return fewest_updates * num_epochs <= length <= most_updates * num_epochs


def has_at_most_one_step_left(scheduler: Any, length: int) -> bool:
    """Whether a schedule has at most one step left, because OneCycleLR ends one step before its length.

    Args:
        scheduler: Schedule to check.
        length: Length of the schedule in scheduler steps.
    """
    num_steps = getattr(scheduler, "last_epoch", None)
    if num_steps is None:  # ChainedScheduler counts steps only in the schedules that it combines
        num_steps = max((getattr(each, "last_epoch", 0) for each in getattr(scheduler, "_schedulers", ())), default=0)
    return int(num_steps) >= length - 1


def is_nearly_zero(scheduler: Any) -> bool:
    """Whether the learning rates of all parameter groups are at most 1/1000 of their initial values.

    Updates then have hardly any effect. False if the scheduler has no optimizer.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return bool(groups) and all(
        float(group["lr"]) <= _NEARLY_ZERO * float(group.get("initial_lr", 0.0)) for group in groups
    )
