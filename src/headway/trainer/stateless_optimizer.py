"""Copies of an optimizer and its schedule without the optimizer's state, which the Trainer keeps after a training run."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler
from headway.errors import StateError


def make_stateless(optimizer: Any, schedule: Any) -> tuple[Any, Any]:
    """Return copies of an optimizer and its schedule without the optimizer's state, to be read after training.

    The copies have the parameter groups, learning rates and settings. They hold no reference to the original state,
    so it can be freed. The optimizer copy's `state_dict()` raises StateError instead of returning an empty state.

    The wrappers that `prepare` added are removed. An optimizer that is not torch's is returned itself, together with
    its schedule, and so is a schedule that is not torch's.

    Args:
        optimizer: Optimizer, prepared or not.
        schedule: Schedule, prepared or not; None if there is none yet.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
    schedule = schedule.scheduler if isinstance(schedule, PreparedScheduler) else schedule
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, schedule
    # The constructor is not called, because it would need the arguments that the user gave.
    stateless = object.__new__(type(optimizer))
    # A schedule replaces `step` on the instance by a function that holds the training's optimizer.
    stateless.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    stateless.state = defaultdict(dict)
    stateless.param_groups = [dict(group) for group in optimizer.param_groups]
    stateless._optimizer_state_dict_pre_hooks = OrderedDict({0: _refuse_state_dict})
    return stateless, _copy_schedule(stateless, schedule)


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Raise `StateError`, because the optimizer's state was freed."""
    raise StateError(
        "the optimizer's state was freed when the training ended; its groups and rates can be read. A checkpoint of the training "
        "contains the state, and so does an optimizer of your own: Trainer(optimizers=(optimizer, None))"
    )


def _copy_schedule(optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
    """Copy a schedule so that it refers to the given optimizer. One that is not torch's is returned unchanged.

    The schedules inside a composite schedule are copied too.
    """
    if not isinstance(schedule, LRScheduler):
        return schedule
    copied = copy.copy(schedule)
    copied.optimizer = optimizer
    inner_schedules = getattr(copied, "_schedulers", None)
    if isinstance(inner_schedules, list | tuple):
        copied.__dict__["_schedulers"] = [_copy_schedule(optimizer, each) for each in inner_schedules]
    return copied
