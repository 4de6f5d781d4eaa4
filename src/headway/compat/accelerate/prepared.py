"""Accumulation windows, optimizers and schedulers that count micro-batches and scheduler steps as Accelerate does."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from headway.compat.accelerate.state import AcceleratorState, GradientState
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler, SchedulerStepRule, StepsPerProcess
from headway.core.training.step import TrainingStep
from headway.core.training.windows import AccumulationWindow, AccumulationWindows
from headway.errors import ConfigError


class CountedWindows(AccumulationWindows):
    """Accumulation windows whose ends are determined by one counter of all micro-batches, as in Accelerate.

    Attributes:
        step: Number of micro-batches since the last DataLoader was exhausted or the run began. Can be assigned.
    """

    step: int = 0

    def _is_complete(self, window: AccumulationWindow, is_end: bool) -> bool:
        self.step = 0 if is_end else self.step + 1
        return self.step % self.num_steps == 0

    def begin_lone_window(self) -> AccumulationWindow:
        """Return a new accumulation window for a backward outside of a `with accelerator.accumulate()` block.

        If `optimizer.step()` would have had no effect after the previous micro-batch, it has none in this window
        either.
        """
        is_due = self.is_due
        window = super().begin_lone_window()
        self.is_held = not is_due
        return window

    def set_due(self, is_due: bool) -> None:
        """Set whether `optimizer.step()` and `zero_grad()` take effect. If False, both do nothing.

        Inside a `with accelerator.accumulate()` block, True also makes the current micro-batch the last one of its
        accumulation window.
        """
        super().set_due(is_due)
        if is_due and self.is_inside:
            self.is_last = self.current.is_last = True

    def reset(self) -> None:
        """Discard all accumulation windows and reset the counter of micro-batches."""
        super().reset()
        self.step = 0


class _AccelerateAttributes:
    """Mixin with the attributes that all of Accelerate's wrapper classes have."""

    _is_accelerate_prepared = True

    @property
    def gradient_state(self) -> GradientState:
        """State of the accumulation windows of the Accelerator that was created last."""
        return GradientState()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """State of the Accelerator that was created last."""
        return AcceleratorState()


def _delegated(name: str) -> Any:
    def write(wrapper: Any, value: Any) -> None:
        setattr(wrapper.optimizer, name, value)

    return property(lambda wrapper: getattr(wrapper.optimizer, name), write)


class AcceleratedOptimizer(_AccelerateAttributes, PreparedOptimizer):
    """Prepared optimizer with the attributes of Accelerate's wrapper."""

    device_placement = True
    state, param_groups, defaults = map(_delegated, ("state", "param_groups", "defaults"))

    @property
    def scaler(self) -> Any:
        """Gradient scaler under fp16, else None. Assigning a different scaler is an error.

        Raises:
            ConfigError: If another scaler is assigned.
        """
        return self._step.precision.scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        check_scaler(value, self.scaler)

    def check_owned(self, known: set[int]) -> None:
        """Raise `PrepareError` if a parameter belongs to no prepared model and there are several processes.

        On one process, other parameters can be trained too. On several processes their values would diverge.

        Args:
            known: IDs of the parameters of prepared models.

        Raises:
            PrepareError: If there are several processes and a parameter belongs to no prepared model.
        """
        if self._strategy.everyone.world_size > 1:
            super().check_owned(known)


def check_scaler(value: Any, known: Any) -> None:
    """Raise `ConfigError` if an assigned gradient scaler differs from the current one.

    Some scripts assign the current scaler (None without gradient scaling), which is allowed.

    Args:
        value: Assigned value.
        known: Current gradient scaler, or None.

    Raises:
        ConfigError: If `value` is another scaler.
    """
    if value is not known:
        raise ConfigError(
            f"scaler = {value!r}: the scaler of a run is fixed; pass GradScalerKwargs to kwargs_handlers to set it up, and "
            "GradScalerKwargs(enabled=False) to scale nothing"
        )


class AcceleratedScheduler(_AccelerateAttributes, PreparedScheduler):
    """Prepared scheduler that counts steps as Accelerate does: one per process each time gradients are synchronized.

    Args:
        scheduler: Object with step() and state_dict().
        optimizers: One or more optimizers. If one of them skipped its step, a call of step() does nothing.
        step_with_optimizer: Whether to step only when the optimizers do. False: every call is one scheduler step.
            Default: True.
        split_batches: Whether each call is one scheduler step on any number of processes. Default: False.
        rule, follows_optimizer, step: Components of the run that prepares the scheduler. None: those of the Accelerator
            that was created last.
    """

    needs_optimizer = False

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        rule: SchedulerStepRule | None = None,
        follows_optimizer: bool | None = None,
        step: TrainingStep | None = None,
    ) -> None:
        several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        count = 1 if split_batches else self.accelerator_state.num_processes
        follows = step_with_optimizer if follows_optimizer is None else follows_optimizer
        super().__init__(scheduler, several, rule or StepsPerProcess(count), follows, step)  # type: ignore[arg-type]

    @staticmethod
    def wraps(obj: Any) -> bool:
        """Whether an object is one of torch's schedulers.

        `prepare` returns other schedulers unwrapped, as in Accelerate.
        """
        return isinstance(obj, LRScheduler)

    @property
    def step_with_optimizer(self) -> bool:
        """Whether the scheduler steps only when its optimizers do."""
        return self.follows_optimizer

    @property
    def split_batches(self) -> bool:
        """Whether one call of step() advances the schedule once, instead of once per process."""
        return self.rule.ticks(1) < self.accelerator_state.num_processes

    def _count_updates(self) -> int:
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a function and its arguments for pickling.

        The unpickled scheduler belongs to no run, and follows the optimizers that are pickled with it.
        """
        return type(self), (self.scheduler, list(self.optimizers), self.follows_optimizer, self.split_batches)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler if the current micro-batch completes an update, by one step per process.

        Without `step_with_optimizer`, advance it by one step in any case.
        """
        if not self.follows_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        is_due = self.gradient_state.sync_gradients if self._step is None else self._step.windows.is_due
        if not is_due or any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        for _ in range(self.rule.ticks(1)):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)
