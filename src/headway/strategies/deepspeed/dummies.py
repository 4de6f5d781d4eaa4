"""Accelerate's stand-ins for an optimizer and a schedule that DeepSpeed's JSON defines. Torch-free."""

from collections.abc import Callable
from typing import Any


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's JSON, over these parameters; prepare() gives the real one back.

    Args:
        params: parameters or groups.
        lr: learning rate, where the JSON says "auto".
        weight_decay: weight decay, where the JSON says "auto".
        kwargs: the same for others, by name.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule of DeepSpeed's JSON, or for what a function makes; prepare() gives the real one back.

    Args:
        optimizer: the optimizer, or its stand-in.
        total_num_steps: updates that a single process would make, where the JSON says "auto".
        warmup_num_steps: updates of warm-up, where the JSON says "auto".
        lr_scheduler_callable: makes the schedule from the optimizer.
        kwargs: others, by name, where the JSON says "auto".
    """

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
