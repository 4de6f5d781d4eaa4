"""Prepared scheduler, which advances only with updates, and the rules for its number of steps per update.

Log messages and settings call a scheduler step a tick, to distinguish it from an optimizer step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.core.training.checks.schedule_lengths import get_decay_length, has_at_most_one_step_left, is_nearly_zero
from headway.core.training.prepared.objects import OptimizerEntry
from headway.core.training.step import TrainingStep
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)


class SchedulerStepRule(Protocol):
    """Interface of a rule for the number of scheduler steps per update."""

    @property
    def name(self) -> str:
        """Short name of the rule."""

    @property
    def reason(self) -> str:
        """Explanation of the number of scheduler steps per update, for the log."""

    def ticks(self, window_length: int) -> int:
        """Return the number of scheduler steps for one update of `window_length` micro-batches."""


@dataclass(frozen=True)
class StepsPerProcess:
    """Rule with P scheduler steps per update on P processes, for schedules written for a loop on a single process.

    That loop makes P times as many updates for the same data, with one scheduler step each. If the number of samples
    per update does not depend on the number of processes, as with `global_batch_size`, it makes equally many: P is 1.

    Attributes:
        num_processes: The number P: updates of the single-process loop for each update of this run.
        name: Short name of the rule.
    """

    num_processes: int
    name: str = "per process"

    @property
    def reason(self) -> str:
        """Explanation of the number of scheduler steps per update, for the log."""
        ticks = "1 tick" if self.num_processes == 1 else f"{self.num_processes} ticks"
        return f"counted in the updates of the single-process loop: {ticks} an update"

    def ticks(self, window_length: int) -> int:
        """Return `num_processes`, the number of scheduler steps for one update of any number of micro-batches."""
        return self.num_processes


@dataclass(frozen=True)
class StepsPerMicroBatch:
    """Rule with P scheduler steps per micro-batch on P processes.

    The rule is for schedules counted in micro-batches of a single process.

    Attributes:
        num_processes: The number P of processes.
        name: Short name of the rule.
    """

    num_processes: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Explanation of the number of scheduler steps per update, for the log."""
        ticks = "1 tick" if self.num_processes == 1 else f"{self.num_processes} ticks"
        return f"counted in single-process micro-batches: {ticks} for each micro-batch of the update"

    def ticks(self, window_length: int) -> int:
        """Return the number of scheduler steps for one update of `window_length` micro-batches.

        It is the number of processes times `window_length`.
        """
        return self.num_processes * window_length


@dataclass(frozen=True)
class KeptSteps:
    """Rule that keeps the scheduler steps per update when a run is resumed with a different number of processes.

    Attributes:
        num_ticks: Scheduler steps for the update of a full accumulation window.
        num_steps: Micro-batches in a full accumulation window of this run. A shorter window makes proportionally fewer
            scheduler steps, rounded up.
        name: Short name of the rule.
    """

    num_ticks: int
    num_steps: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Explanation of the number of scheduler steps per update, for the log."""
        return f"counted in the micro-batches of the run that was resumed: {self.num_ticks} ticks a full update"

    def ticks(self, window_length: int) -> int:
        """Return the number of scheduler steps for one update of `window_length` micro-batches, rounded up.

        A full window of `num_steps` micro-batches makes `num_ticks` scheduler steps, and other windows proportionally
        many.
        """
        return -(-self.num_ticks * window_length // self.num_steps)


@dataclass(frozen=True)
class StepsPerUpdate:
    """Rule with one scheduler step per update, for schedules counted in updates.

    Attributes:
        name: Short name of the rule.
        reason: Explanation of the number of scheduler steps per update, for the log.
    """

    name: str = "updates"
    reason: str = "counted in updates: 1 tick an update"

    def ticks(self, window_length: int) -> int:
        """Return 1, the number of scheduler steps for one update of any number of micro-batches."""
        return 1


class PreparedScheduler(LRScheduler):
    """Wrapper around the user's scheduler. Attributes that it does not define are read from the wrapped scheduler.

    Args:
        scheduler: User's scheduler: an object with step(), state_dict() and load_state_dict().
        optimizers: Prepared optimizers whose updates advance the schedule.
        rule: Rule for the number of scheduler steps per update.
        follows_optimizer: Whether a call to `step` advances the schedule only if there was an update. If False, every
            call makes one scheduler step.
        step: Training step. If it splits batches into smaller micro-batches, a scheduler step that does not depend on
            updates is deferred until the whole batch has succeeded.

    Attributes:
        has_length_warning: Whether a warning about the schedule's length has been given.
        num_calls: Number of calls to `step` that do not depend on updates: with `follows_optimizer=False`, for
            ReduceLROnPlateau, or with arguments. Repeated calls that `ignore_repeated` skips are counted, too.
    """

    needs_optimizer: ClassVar[bool] = True
    """Whether it is an error to prepare a scheduler whose optimizer is not prepared."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[OptimizerEntry],
        rule: SchedulerStepRule,
        follows_optimizer: bool,
        step: TrainingStep,
    ) -> None:
        # LRScheduler.__init__ would make a step and bind the optimizer a second time, so everything is delegated
        # instead.
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.rule = rule
        self.follows_optimizer = follows_optimizer
        self._step = step
        self.num_calls = 0
        self._num_calls_to_ignore = 0
        self._num_counted_updates = self._count_updates()
        self._decay_length = get_decay_length(scheduler)
        self._num_updates_after_end = 0
        self.has_length_warning = False
        self._is_one_cycle = isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # requested before __init__ (by copy or pickle)
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"

    @staticmethod
    def is_scheduler(obj: Any) -> bool:
        """Whether an object is a scheduler: an LRScheduler, or an object with the methods that are needed.

        These are step, state_dict and load_state_dict. Classes, and objects with an optimizer's methods, do not count.
        """
        if isinstance(obj, LRScheduler):
            return True
        names = ("step", "state_dict", "load_state_dict")
        return (
            not isinstance(obj, type)
            and not is_like_optimizer(obj)
            and all(callable(getattr(obj, name, None)) for name in names)
        )

    def _count_updates(self) -> int:
        """Return the largest number of updates that an optimizer of this scheduler has made. 0 without optimizers."""
        return max([optimizer.num_updates for optimizer in self.optimizers], default=0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule for the update that was just made.

        Do nothing if there was no update since the last call. If the script runs backward outside `accumulate` although
        an update has several micro-batches, each call advances the schedule, unless an optimizer's step was skipped.

        If `follows_optimizer` is False, each call advances the schedule by one step. So does a call for
        ReduceLROnPlateau, or with arguments such as a metric, because such schedulers count evaluations.

        Args:
            *args: Arguments of the wrapped scheduler's step().
            **kwargs: Keyword arguments of the wrapped scheduler's step().
        """
        if not self.follows_optimizer or args or kwargs or isinstance(self.scheduler, ReduceLROnPlateau):
            self.num_calls += 1
            if self._num_calls_to_ignore:
                self._num_calls_to_ignore -= 1
                return
            self._step.tick_scheduler(lambda: self.scheduler.step(*args, **kwargs))
            return
        num_updates = window_length = 0
        for optimizer in self.optimizers:
            num_updates = max(num_updates, optimizer.num_updates)
            window_length = max(window_length, optimizer.last_window_length)
        num_new_updates = num_updates - self._num_counted_updates
        if num_new_updates == 0:
            is_standalone_fraction = self._step.windows.current.is_standalone_fraction
            if not is_standalone_fraction or self._has_skipped_step():
                return
        if num_new_updates > 1:
            log.warning_once(
                "%s.step() was called once for %d updates. A schedule that is stepped per epoch needs "
                "Accelerator(step_scheduler_with_optimizer=False); now it ticked for the last update only",
                type(self.scheduler).__name__,
                num_new_updates,
            )
        self._num_counted_updates = num_updates
        self._make_scheduler_steps(self.rule.ticks(window_length))

    def _make_scheduler_steps(self, num_steps: int) -> None:
        """Make the scheduler steps of one update. Warn once if the schedule ended long ago.

        Args:
            num_steps: Number of scheduler steps, as the rule determines it.
        """
        num_possible_steps = num_steps
        if self._is_one_cycle:  # OneCycleLR raises an error if it steps past its end
            num_possible_steps = min(num_steps, count_remaining_steps(self.scheduler))
        for _ in range(num_possible_steps):
            self.scheduler.step()
        decay_length = self._decay_length
        if num_steps > 1 and decay_length is not None and has_at_most_one_step_left(self.scheduler, decay_length):
            self._warn_of_updates_after_end(num_steps, decay_length)

    def _warn_of_updates_after_end(self, ticks: int, length: int) -> None:
        """Warn once if updates continue well after the schedule's end, at a learning rate of nearly zero.

        The last accumulation window of an epoch can be incomplete and still makes an update, so a few updates after the
        schedule's end are normal. The warning comes after more than 2 updates plus a tenth of the schedule's.

        Args:
            ticks: Scheduler steps that the current update would make.
            length: Length of the schedule in scheduler steps.
        """
        if self.has_length_warning or not is_nearly_zero(self.scheduler):
            return
        self._num_updates_after_end += 1
        if self._num_updates_after_end > 2 + 0.1 * length / ticks:
            log.warning_once(
                "%s has ended after %d updates, and training continues with a learning rate of %g: it has %d ticks and makes %d "
                "an update, one for each update of the single-process loop. If its length counts the updates of this run, "
                "multiply it by accelerator.num_data_shards, or pass Accelerator(scheduler_ticks='updates') (docs/schedules.md)",
                type(self.scheduler).__name__,
                -(-length // ticks),
                self.get_last_lr()[0],
                length,
                ticks,
            )

    def _has_skipped_step(self) -> bool:
        """Whether an optimizer of this scheduler skipped its last step."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def set_rule(self, rule: SchedulerStepRule) -> None:
        """Set the rule for the number of scheduler steps per update."""
        self.rule = rule

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates that the wrapped scheduler computes."""
        return self.scheduler.get_lr()  # type: ignore[no-any-return]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the current learning rate of each group."""
        return self.scheduler.get_last_lr()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state dict."""
        return self.scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state dict."""
        self.scheduler.load_state_dict(state)
        self.catch_up()

    def seek(self, tick: int) -> None:
        """Make the wrapped scheduler, a LambdaLR, continue from the scheduler step `tick`."""
        self.scheduler.last_epoch = tick

    def ignore_repeated(self, num_calls: int) -> None:
        """Ignore the next `num_calls` calls to step().

        The resumed loop repeats these calls, but the loaded state already includes them.

        Args:
            num_calls: Number of calls that the saving run made after the point from which the resumed loop continues.
        """
        self._num_calls_to_ignore = num_calls

    def catch_up(self) -> None:
        """Treat all updates so far as already counted, because the loaded state of the schedule includes them.

        The loaded state can also have changed the schedule's length, so read it again.
        """
        self._num_counted_updates = self._count_updates()
        self._decay_length = get_decay_length(self.scheduler)


def is_like_optimizer(obj: Any) -> bool:
    """Whether an object has an optimizer's methods. False for classes."""
    return not isinstance(obj, type) and hasattr(obj, "param_groups") and callable(getattr(obj, "zero_grad", None))


def count_remaining_steps(scheduler: Any) -> int:
    """Return the number of steps that a scheduler still accepts. For most schedulers, it is a very large number.

    Only OneCycleLR raises an error if it steps past its end.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        return max(0, scheduler.total_steps - 1 - scheduler.last_epoch)
    return 1 << 30


def choose_rule(
    scheduler_ticks: str | SchedulerStepRule | None, counts_micro_batches: bool, num_processes: int
) -> SchedulerStepRule:
    """Return the rule for the number of scheduler steps per update.

    Args:
        scheduler_ticks: "updates" for `StepsPerUpdate`, a rule object, or None for the rule that `counts_micro_batches`
            selects.
        counts_micro_batches: Whether the lengths of schedules were counted in micro-batches (`StepsPerMicroBatch`). If
            False, the rule is `StepsPerProcess`.
        num_processes: Number of updates that a loop on a single process makes for the data of one update of this run.
            1 if the batches of a single process are split among ranks.

    Raises:
        ConfigError: If the name is unknown, or `scheduler_ticks` and `counts_micro_batches` are both set.
    """
    if scheduler_ticks is not None and counts_micro_batches:
        raise ConfigError(
            "scheduler_ticks and adjust_scheduler_to_accumulation both set the rule for the schedule; give one"
        )
    if scheduler_ticks is None:
        return StepsPerMicroBatch(num_processes) if counts_micro_batches else StepsPerProcess(num_processes)
    if scheduler_ticks == "updates":
        return StepsPerUpdate()
    if isinstance(scheduler_ticks, str):
        raise ConfigError(
            f"scheduler_ticks={scheduler_ticks!r}; allowed: 'updates', None, or an object with ticks(window_length)"
        )
    return scheduler_ticks
