"""Accelerate's placeholders for an optimizer and a scheduler that DeepSpeed's JSON defines, without importing torch."""

from collections.abc import Callable
from typing import Any

from headway.core.strategies.placeholders import OptimizerPlaceholder, SchedulerPlaceholder

_DEFINED_BY = "DeepSpeed's JSON"
_ENGINE = "deepspeed"


class DummyOptim(OptimizerPlaceholder):
    """Placeholder for the optimizer that DeepSpeed's JSON defines. `prepare()` returns the real optimizer.

    `prepare()` raises PrepareError if the run does not use DeepSpeed, and ConfigError if the JSON defines no optimizer.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, used if the JSON has "auto". Default: 0.001.
        weight_decay: Weight decay, used if the JSON has "auto". Default: 0.
        kwargs: Values for other "auto" settings of the optimizer, by name.
    """

    defined_by = _DEFINED_BY
    engine = _ENGINE

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(SchedulerPlaceholder):
    """Placeholder for the scheduler that DeepSpeed's JSON or a function defines.

    `prepare()` returns the real scheduler. It raises PrepareError if the run does not use DeepSpeed.

    Args:
        optimizer: Optimizer of the schedule, or its `DummyOptim`. Prepare it earlier, or in the same call.
        total_num_steps: Number of optimizer steps of a single-process run, used if the JSON has "auto". None (the
            default): an "auto" is removed from the JSON, so that the scheduler's own default applies.
        warmup_num_steps: Number of warm-up steps, used if the JSON has "auto". Default: 0.
        lr_scheduler_callable: Function that creates the scheduler from the optimizer. None (the default): the JSON
            defines it.
        kwargs: Values for other "auto" settings of the scheduler, by name.
    """

    defined_by = _DEFINED_BY
    engine = _ENGINE

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
