"""Accumulation windows and wrappers of optimizers and schedulers that count steps as Accelerate does."""

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
        step: Number of micro-batches since a DataLoader was last exhausted, or since the run began. Can be assigned.
    """

    step: int = 0

    def _is_complete(self, window: AccumulationWindow, is_end: bool) -> bool:
        # As in Accelerate, the end of a DataLoader restarts the counter, and 0 counts as the end of a window.
        self.step = 0 if is_end else self.step + 1
        return self.step % self.num_steps == 0

    def begin_standalone_window(self) -> AccumulationWindow:
        """Return a new accumulation window for a backward outside of a `with accelerator.accumulate()` block.

        `optimizer.step()` has an effect in this window only if it would have had one after the previous micro-batch.
        """
        is_step_due = self.is_step_due
        window = super().begin_standalone_window()
        self.are_steps_disabled = not is_step_due
        return window

    def set_steps_enabled(self, is_enabled: bool) -> None:
        """Set whether `optimizer.step()` and `zero_grad()` take effect until the next micro-batch begins.

        If False, both do nothing. Inside a `with accelerator.accumulate()` block, True also makes the current
        micro-batch the last one of the accumulation window.
        """
        super().set_steps_enabled(is_enabled)
        if is_enabled and self.is_inside:
            self.is_last = self.current.is_last = True

    def reset(self) -> None:
        """Discard all accumulation windows and reset the counter of micro-batches."""
        super().reset()
        self.step = 0


class _AccelerateAttributes:
    """Mixin with the attributes that all of Accelerate's wrapper classes share."""

    _is_accelerate_prepared = True

    @property
    def gradient_state(self) -> GradientState:
        """State of the accumulation windows of the Accelerator that was created last."""
        return GradientState()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """State of the Accelerator that was created last."""
        return AcceleratorState()


def _delegate_to_optimizer(name: str) -> Any:
    """Return a property that reads and sets an attribute of the wrapped optimizer."""

    def set_on_optimizer(wrapper: Any, value: Any) -> None:
        setattr(wrapper.optimizer, name, value)

    return property(lambda wrapper: getattr(wrapper.optimizer, name), set_on_optimizer)


class AcceleratedOptimizer(_AccelerateAttributes, PreparedOptimizer):
    """Prepared optimizer with the attributes of Accelerate's wrapper."""

    device_placement = True
    state, param_groups, defaults = map(_delegate_to_optimizer, ("state", "param_groups", "defaults"))

    @property
    def scaler(self) -> Any:
        """Gradient scaler under fp16, else None. Only the current value can be assigned.

        Raises:
            ConfigError: If a different value is assigned.
        """
        return self._step.precision.scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        check_scaler(value, self.scaler)

    def check_owned(self, prepared_ids: set[int]) -> None:
        """Raise an error if a parameter belongs to no prepared model and there are several processes.

        In a single-process run, such parameters can be trained. With several processes, their values would diverge.

        Args:
            prepared_ids: IDs of the parameters of prepared models.

        Raises:
            PrepareError: If there are several processes and a parameter belongs to no prepared model.
        """
        if self._strategy.everyone.world_size > 1:
            super().check_owned(prepared_ids)


def check_scaler(value: Any, current: Any) -> None:
    """Raise an error if an assigned gradient scaler is not the current one.

    Some scripts assign the current scaler again (None without gradient scaling), which is allowed.

    Args:
        value: Assigned value.
        current: Current gradient scaler, or None.

    Raises:
        ConfigError: If `value` is not `current`.
    """
    if value is not current:
        raise ConfigError(
            f"scaler = {value!r}: the scaler of a run is fixed; pass GradScalerKwargs to kwargs_handlers to set it up, and "
            "GradScalerKwargs(enabled=False) to scale nothing"
        )


class AcceleratedScheduler(_AccelerateAttributes, PreparedScheduler):
    """Prepared scheduler that counts steps as Accelerate does: an update counts once per process.

    Args:
        scheduler: Object with step() and state_dict().
        optimizers: One or more optimizers. If one of them skipped its step, step() of the scheduler does nothing.
        step_with_optimizer: Whether to step only when the optimizers do. False: each call of step() advances the
            schedule once. Default: True.
        split_batches: Whether an update counts once, whatever the number of processes. Default: False.
        rule, follows_optimizer, step: Components that the Accelerator passes when it prepares the scheduler. None:
            determined by the other arguments and by the Accelerator that was created last.
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
        optimizer_list = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        count = 1 if split_batches else self.accelerator_state.num_processes
        is_following = step_with_optimizer if follows_optimizer is None else follows_optimizer
        super().__init__(scheduler, optimizer_list, rule or StepsPerProcess(count), is_following, step)  # type: ignore[arg-type]

    @staticmethod
    def is_scheduler(obj: Any) -> bool:
        """Whether `prepare` wraps an object in this class, because it is one of torch's schedulers.

        As in Accelerate, other schedulers are returned unwrapped.
        """
        return isinstance(obj, LRScheduler)

    @property
    def step_with_optimizer(self) -> bool:
        """Whether the scheduler steps only when its optimizers do."""
        return self.follows_optimizer

    @property
    def split_batches(self) -> bool:
        """Whether a call of step() advances the schedule by one step instead of one step per process.

        False in a single-process run, where both are equal.
        """
        return self.rule.ticks(1) < self.accelerator_state.num_processes

    def _count_updates(self) -> int:
        return 0  # this class does not count updates: its step() asks the windows and optimizers instead

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the class and its constructor arguments, for pickling.

        The unpickled scheduler belongs to no run, and follows the optimizers that are pickled with it.
        """
        return type(self), (self.scheduler, list(self.optimizers), self.follows_optimizer, self.split_batches)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule by one step per process if the current micro-batch ends its accumulation window.

        Do nothing if an optimizer skipped its step. A schedule with `total_steps` is not advanced beyond its end.
        Without `step_with_optimizer`, advance by one step in any case.

        Args:
            args, kwargs: Arguments of the wrapped scheduler's step().
        """
        if not self.follows_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        is_due = self.gradient_state.sync_gradients if self._step is None else self._step.windows.is_step_due
        if not is_due or any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        for _ in range(self.rule.ticks(1)):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)
