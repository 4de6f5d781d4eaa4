"""Windows, optimizers and schedules with Accelerate's counting: one counter of micro-batches, schedules that tick by call."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from headway.compat.accelerate.state import AcceleratorState, GradientState
from headway.errors import ConfigError
from headway.training.prepared.optimizer import PreparedOptimizer
from headway.training.prepared.scheduler import PreparedScheduler, SchedulerStepRule, StepsPerProcess
from headway.training.step import TrainingStep
from headway.training.windows import AccumulationWindow, AccumulationWindows


class CountedWindows(AccumulationWindows):
    """Windows that end where a counter of all micro-batches says so, as Accelerate's do.

    Attributes:
        step: micro-batches since the data last ended, or the run began; settable.
    """

    step: int = 0

    def _ends(self, window: AccumulationWindow, is_end: bool) -> bool:
        self.step = 0 if is_end else self.step + 1
        return self.step % self.num_steps == 0

    def begin_alone(self) -> AccumulationWindow:
        """A backward outside any micro-batch lets step() act where the micro-batch before it did."""
        is_due = self.is_due
        window = super().begin_alone()
        self._is_held = not is_due
        return window

    def set_due(self, is_due: bool) -> None:
        """Let step() and zero_grad() act or wait; in a block, the micro-batch in hand ends its window."""
        super().set_due(is_due)
        if is_due and self.is_inside:
            self.is_last = self.current.is_last = True

    def reset(self) -> None:
        """Forget all windows; the counter starts over."""
        super().reset()
        self.step = 0


class _Known:
    """What Accelerate's wrappers have in common."""

    _is_accelerate_prepared = True

    @property
    def gradient_state(self) -> GradientState:
        """The windows of the Accelerator created last."""
        return GradientState()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The Accelerator created last."""
        return AcceleratorState()


def _delegated(name: str) -> Any:
    def write(wrapper: Any, value: Any) -> None:
        setattr(wrapper.optimizer, name, value)

    return property(lambda wrapper: getattr(wrapper.optimizer, name), write)


class AcceleratedOptimizer(_Known, PreparedOptimizer):
    """A prepared optimizer with the attributes of Accelerate's."""

    device_placement = True
    state, param_groups, defaults = map(_delegated, ("state", "param_groups", "defaults"))

    @property
    def scaler(self) -> Any:
        """The gradient scaler under fp16; else None.

        Raises:
            ConfigError: another one is assigned.
        """
        return self._step.precision.scaler

    @scaler.setter
    def scaler(self, value: Any) -> None:
        check_scaler(value, self.scaler)

    def check_owned(self, known: set[int]) -> None:
        """One process may learn what belongs to no prepared model; several would each learn another value.

        Raises:
            PrepareError: on several.
        """
        if self._strategy.everyone.world_size > 1:
            super().check_owned(known)


def check_scaler(value: Any, known: Any) -> None:
    """Scripts set the scaler to what it is, or to None where losses are not scaled.

    Raises:
        ConfigError: it is another one.
    """
    if value is not known:
        raise ConfigError(
            f"scaler = {value!r}: the scaler of a run is fixed; pass GradScalerKwargs to kwargs_handlers to set it up, and "
            "GradScalerKwargs(enabled=False) to scale nothing"
        )


class AcceleratedScheduler(_Known, PreparedScheduler):
    """A schedule that ticks by Accelerate's arithmetic: each call is one for every process, where gradients are synchronised.

    Args:
        scheduler: anything with step() and state_dict().
        optimizers: one or several; where one of them skipped its step, the call does nothing.
        step_with_optimizer: False: every call is one tick.
        split_batches: a call is one tick.
        rule, follows_optimizer, step: of the run that prepares it; without them the Accelerator created last is asked.
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
        """Is it one of torch's? Other objects come back as they are, as from Accelerate."""
        return isinstance(obj, LRScheduler)

    @property
    def step_with_optimizer(self) -> bool:
        """Does it follow its optimizers?"""
        return self.follows_optimizer

    @property
    def split_batches(self) -> bool:
        """Is a call one tick, on several processes too?"""
        return self.rule.ticks(1) < self.accelerator_state.num_processes

    def _count(self) -> int:
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy follows copies of its optimizers, and takes part in no run."""
        return type(self), (self.scheduler, list(self.optimizers), self.follows_optimizer, self.split_batches)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick for each process, unless the micro-batch in hand makes no update."""
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
