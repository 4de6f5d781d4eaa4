"""The prepared scheduler: ticks for updates that happened, by the rule in force; and the rules there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.errors import ConfigError
from headway.log import get_logger
from headway.training.prepared.objects import OptimizerEntry
from headway.training.step import TrainingStep

log = get_logger(__name__)


class SchedulerStepRule(Protocol):
    """How often a schedule is stepped for one update."""

    @property
    def name(self) -> str:
        """A short name."""

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""

    def ticks(self, window_length: int) -> int:
        """Schedule steps for an update of a window of `window_length` micro-batches."""


@dataclass(frozen=True)
class StepsPerProcess:
    """P ticks per update on P processes: the schedule was written for the single-process loop, stepped once an update.

    That loop makes P times as many updates for the same data.
    """

    num_processes: int
    name: str = "per process"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        ticks = "1 tick" if self.num_processes == 1 else f"{self.num_processes} ticks"
        return f"counted in the updates of the single-process loop: {ticks} an update"

    def ticks(self, window_length: int) -> int:
        """The number of processes."""
        return self.num_processes


@dataclass(frozen=True)
class StepsPerMicroBatch:
    """P times the window's length: the schedule was counted in the micro-batches of the single-process loop."""

    num_processes: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        return f"counted in single-process micro-batches: {self.num_processes} ticks for each micro-batch of the update"

    def ticks(self, window_length: int) -> int:
        """Processes times the real window."""
        return self.num_processes * window_length


@dataclass(frozen=True)
class KeptSteps:
    """As many ticks as an update had before the run was resumed on another world, with windows of another length.

    Attributes:
        num_ticks: of an update of a full window.
        num_steps: micro-batches of a full window now; a shorter one ticks in proportion, rounded up.
    """

    num_ticks: int
    num_steps: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        return f"counted in the micro-batches of the run that was resumed: {self.num_ticks} ticks a full update"

    def ticks(self, window_length: int) -> int:
        """In proportion to the window."""
        return -(-self.num_ticks * window_length // self.num_steps)


@dataclass(frozen=True)
class StepsPerUpdate:
    """One tick per update: the schedule was counted in real updates."""

    name: str = "updates"
    reason: str = "counted in updates: 1 tick an update"

    def ticks(self, window_length: int) -> int:
        """1, whatever its length."""
        return 1


class PreparedScheduler(LRScheduler):
    """Wraps the user's schedule; unknown attributes are the wrapped one's.

    Args:
        scheduler: anything with step() and state_dict().
        optimizers: the prepared optimizers it follows.
        rule: ticks for an update.
        follows_optimizer: False: every call of step() is one tick, whatever the optimizers did.
        step: the run's; where it runs a batch in pieces, a tick of its own waits until the batch is committed.
    """

    needs_optimizer: ClassVar[bool] = True
    """Is a schedule of an optimizer that is not prepared an error?"""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[OptimizerEntry],
        rule: SchedulerStepRule,
        follows_optimizer: bool,
        step: TrainingStep,
    ) -> None:
        # LRScheduler.__init__ would tick and bind the optimizer a second time: everything is delegated instead.
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.rule = rule
        self.follows_optimizer = follows_optimizer
        self._step = step
        self._seen = self._count()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"

    @staticmethod
    def wraps(obj: Any) -> bool:
        """Is it a schedule? Anything with step and state_dict that is not an optimizer or model counts as one."""
        if isinstance(obj, LRScheduler):
            return True
        names = ("step", "state_dict", "load_state_dict")
        return not isinstance(obj, type) and all(callable(getattr(obj, name, None)) for name in names)

    def _count(self) -> int:
        return max([optimizer.num_updates for optimizer in self.optimizers], default=0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick for the update just made; nothing where there was none since the last tick.

        Where the caller closes windows by hand, each call is for one, but for updates that fp16 skipped. A schedule that is
        given a value (ReduceLROnPlateau's metric) ticks once a call: it counts evaluations.
        """
        if not self.follows_optimizer or args or kwargs or isinstance(self.scheduler, ReduceLROnPlateau):
            self._step.tick(lambda: self.scheduler.step(*args, **kwargs))
            return
        count = self._count()
        if count == self._seen and not self._is_by_hand:
            return
        if count - self._seen > 1:
            log.warning_once(
                "%s.step() was called once for %d updates. A schedule that is stepped per epoch needs "
                "Accelerator(step_scheduler_with_optimizer=False); now it ticked for the last update only",
                type(self.scheduler).__name__,
                count - self._seen,
            )
        self._seen = count
        window = max([optimizer.last_window_length for optimizer in self.optimizers])
        for _ in range(min(self.rule.ticks(window), ticks_left(self.scheduler))):
            self.scheduler.step()

    @property
    def _is_by_hand(self) -> bool:
        is_by_hand = self._step.windows.current.is_by_hand
        return is_by_hand and not any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def go_by(self, rule: SchedulerStepRule) -> None:
        """Tick by another rule from now on."""
        self.rule = rule

    def get_lr(self) -> list[float | torch.Tensor]:
        """As the wrapped schedule computes it."""
        return self.scheduler.get_lr()  # type: ignore[no-any-return]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped schedule's state."""
        return self.scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the wrapped schedule's state."""
        self.scheduler.load_state_dict(state)
        self.catch_up()

    def seek(self, tick: int) -> None:
        """Let the wrapped schedule, a LambdaLR, go on from that tick."""
        self.scheduler.last_epoch = tick

    def catch_up(self) -> None:
        """Updates so far count as ticked for: the schedule's own state says where it stands."""
        self._seen = self._count()


def ticks_left(scheduler: Any) -> int:
    """How many more ticks a schedule takes; OneCycleLR raises when stepped past its end."""
    if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        return max(0, scheduler.total_steps - 1 - scheduler.last_epoch)
    return 1 << 30


def schedule_length(scheduler: Any) -> int | None:
    """The number of ticks after which the schedule has run its course, where it says so."""
    for name in ("total_steps", "T_max", "total_iters"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int):
            return value
    # transformers' schedules are LambdaLR over functools.partial objects that carry their length.
    for function in getattr(scheduler, "lr_lambdas", None) or ():
        length = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(length, int):
            return length
    children = getattr(scheduler, "_schedulers", None)
    milestones = getattr(scheduler, "_milestones", None)
    if children and milestones:
        rest = schedule_length(children[-1])
        return None if rest is None else milestones[-1] + rest
    return None


def choose_rule(given: str | SchedulerStepRule | None, in_micro_batches: bool, num_processes: int) -> SchedulerStepRule:
    """The tick rule that the settings mean.

    Args:
        given: "updates", a rule object, or None.
        in_micro_batches: schedules were counted in micro-batches.
        num_processes: by how much the single-process loop made more updates; 1 where batches are split.

    Raises:
        ConfigError: an unknown word, or two rules at once.
    """
    if given is not None and in_micro_batches:
        raise ConfigError(
            "scheduler_ticks and adjust_scheduler_to_accumulation both set the rule for the schedule; give one"
        )
    if given is None:
        return StepsPerMicroBatch(num_processes) if in_micro_batches else StepsPerProcess(num_processes)
    if given == "updates":
        return StepsPerUpdate()
    if isinstance(given, str):
        raise ConfigError(
            f"scheduler_ticks={given!r}; allowed: 'updates', None, or an object with ticks(window_length)"
        )
    return given
