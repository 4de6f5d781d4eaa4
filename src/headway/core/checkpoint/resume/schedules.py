"""Compare learning rate schedulers with the saved ones, and restore their counts.

A resumed scheduler must continue with its learning rate and its count. The state of torch's own schedulers holds their
position and all settings, except the function of a LambdaLR, which the script creates anew. If that function uses the
number of processes, it returns different values when this number changes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LambdaLR

from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.resume.loader_positions import Differences
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.state import CollectedState
from headway.core.training.prepared.objects import SchedulerEntry
from headway.core.training.prepared.prepare import Preparation
from headway.core.training.prepared.scheduler import StepsPerUpdate

_CALLS = "calls of step()"
"""Unit of schedulers that every call of `step` advances, instead of every update."""


def list_schedule_units(preparation: Preparation) -> list[str]:
    """Return, for each prepared learning rate scheduler, the unit that its steps count, such as "updates"."""
    return [_get_tick_unit(each) for each in preparation.schedulers]


def find_changed_schedules(
    preparation: Preparation, saved_run: SavedRun, saved_state: CollectedState, num_processes: int
) -> Differences:
    """Compare the learning rate schedulers with the saved ones.

    Args:
        preparation: Prepared objects with the schedulers, and the rule by which each scheduler advances.
        saved_run: Counters and settings of the saved run.
        saved_state: State of the checkpoint. The caller must have checked that it fits the schedulers.
        num_processes: Number of processes of this run. If it equals that of the saved run, changed learning rates are
            only reported.
    """
    refused: list[str] = []
    reported: list[str] = []
    for index, entry in enumerate(preparation.schedulers):
        where = f"schedule {index} ({type(entry.scheduler).__name__})"
        unit, former = _get_tick_unit(entry), saved_run.units[index]
        is_recounted = _is_recounted(entry, former)
        if former != unit and not is_recounted:
            refused.append(
                f"{where} counted ticks by the rule {former!r} when it was saved, and counts them by {unit!r} now"
            )
            continue
        state = dict(decode_value(saved_state.state["scheduler"][index], saved_state.tensors))
        if is_recounted:
            state["last_epoch"] = _count_updates(preparation, entry, saved_run)
        for jump in _find_jumps(entry.scheduler, state):
            line = f"{where}: its learning rate at tick {jump.tick} was {jump.saved_lr:g}, and is {jump.own_lr:g}"
            if saved_run.world_size == num_processes:
                reported.append(line)
                continue
            refused.append(
                f"{line}. Its function depends on the number of processes, which has changed, but a resumed run keeps counting the "
                f"former ticks. Compute it with the former number, {saved_run.world_size}. Or let it count updates, and pass "
                "scheduler_ticks='updates' to the Accelerator"
            )
    return Differences(refused, reported)


def recount_schedules(preparation: Preparation, saved_run: SavedRun) -> None:
    """Correct the position of each `LambdaLR` scheduler that counts updates now but did not in the saved run.

    Its position becomes the number of updates made. Other schedulers are left unchanged. This function must be called
    after the schedulers' states are loaded.

    Args:
        preparation: Prepared objects with the schedulers.
        saved_run: Counters and settings of the saved run.
    """
    for entry, former in zip(preparation.schedulers, saved_run.units):
        if _is_recounted(entry, former):
            entry.seek(_count_updates(preparation, entry, saved_run))


def _is_recounted(entry: SchedulerEntry, former: str) -> bool:
    """Whether a LambdaLR, whose only state is its position, counts updates now but counted another unit before.

    Args:
        entry: Prepared scheduler.
        former: Unit that the scheduler counted in the saved run.
    """
    counts_updates = _get_tick_unit(entry) == StepsPerUpdate.name
    return counts_updates and former != StepsPerUpdate.name and type(entry.scheduler) is LambdaLR


def _count_updates(preparation: Preparation, entry: SchedulerEntry, saved_run: SavedRun) -> int:
    """Return the largest number of updates that an optimizer of a scheduler had made in the saved run.

    Args:
        preparation: Prepared objects of this run.
        entry: Prepared scheduler.
        saved_run: Counters of the saved run.
    """
    counts = zip(preparation.optimizers, saved_run.optimizer_updates)
    return max(count for optimizer, count in counts if any(optimizer is each for each in entry.optimizers))


def _get_tick_unit(entry: SchedulerEntry) -> str:
    """Return the unit that the steps of a scheduler count."""
    return entry.rule.name if entry.follows_optimizer else _CALLS


class LearningRateJump(NamedTuple):
    """Learning rate of a scheduler that differs from the saved one at the same scheduler step.

    Attributes:
        saved_lr: Learning rate in the saved run.
        own_lr: Learning rate of this run's scheduler.
        tick: Scheduler step, 0-based.
    """

    saved_lr: float
    own_lr: float
    tick: int


def _find_jumps(scheduler: Any, state: Mapping[str, Any]) -> Iterator[LearningRateJump]:
    """Yield, for each LambdaLR in a scheduler, the first learning rate that differs from the saved one.

    The learning rates are computed for the saved scheduler step. Callable objects are left out, because they continue
    from their saved attributes.

    Args:
        scheduler: Scheduler of this run, which can contain others.
        state: Saved state of the scheduler.
    """
    for inner, inner_state in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())):
        yield from _find_jumps(inner, inner_state)
    tick = state.get("last_epoch")
    # The step is negative if this scheduler is part of a sequence that has not reached it yet.
    if not isinstance(scheduler, LambdaLR) or not isinstance(tick, int) or tick < 0:
        return
    functions = zip(scheduler.lr_lambdas, state["lr_lambdas"], state["base_lrs"], state["_last_lr"])
    for function, attributes, base_lr, saved_lr in functions:
        is_callable_object = bool(attributes)  # it continues from its saved attributes
        if is_callable_object or base_lr is None or saved_lr is None:
            continue
        own_lr = float(base_lr * function(tick))
        if not math.isclose(own_lr, float(saved_lr), rel_tol=1e-6, abs_tol=1e-12):
            yield LearningRateJump(float(saved_lr), own_lr, tick)
            return
