"""The prepared scheduler: ticks for updates that happened, by the rule in force."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.log import get_logger
from headway.training.accumulation import Accumulation
from headway.training.clock import TickRule
from headway.training.optimizer import PreparedOptimizer

log = get_logger(__name__)


class PreparedScheduler(LRScheduler):
    """Wraps the user's schedule; unknown attributes are the wrapped one's.

    Args:
        scheduler: anything with step() and state_dict().
        optimizers: the prepared optimizers it follows.
        rule: ticks for an update.
        follows_optimizer: False: every call of step() is one tick, whatever the optimizers did.
        accumulation: the run's windows; where a batch is run in pieces, a tick of its own waits until the batch stands.
    """

    def __init__(self, scheduler: Any, optimizers: list[PreparedOptimizer], rule: TickRule, follows_optimizer: bool,
                 accumulation: Accumulation | None = None) -> None:  # fmt: skip
        # LRScheduler.__init__ would tick and bind the optimizer a second time: everything is delegated instead.
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.rule = rule
        self.follows_optimizer = follows_optimizer
        self._accumulation = accumulation
        self._seen = self._count()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"

    def _count(self) -> int:
        return max((optimizer.num_updates for optimizer in self.optimizers), default=0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick for the update just made; nothing where there was none since the last tick.

        Where the caller closes windows by hand, each call is for one, but for updates that fp16 skipped. A schedule that is
        given a value (ReduceLROnPlateau's metric) ticks once a call: it counts evaluations.
        """
        if not self.follows_optimizer or args or kwargs or isinstance(self.scheduler, ReduceLROnPlateau):
            self._tick(*args, **kwargs)
            return
        count = self._count()
        if count == self._seen and not self._is_by_hand:
            return
        if count - self._seen > 1:
            log.warning_once(
                "%s.step() was called once for %d updates. A schedule that is stepped per epoch needs "
                "Accelerator(step_scheduler_with_optimizer=False); now it ticked for the last update only",
                type(self.scheduler).__name__, count - self._seen,
            )  # fmt: skip
        self._seen = count
        window = max(optimizer.last_window_length for optimizer in self.optimizers)
        for _ in range(min(self.rule.ticks(window), ticks_left(self.scheduler))):
            self.scheduler.step()

    @property
    def _is_by_hand(self) -> bool:
        accumulation = self._accumulation
        if accumulation is None or not accumulation.current.is_by_hand:
            return False
        return not any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def _tick(self, *args: Any, **kwargs: Any) -> None:
        accumulation = self._accumulation
        if accumulation is None or accumulation.transaction is None:
            self.scheduler.step(*args, **kwargs)
            return
        is_last = accumulation.piece is None or accumulation.piece.is_last
        accumulation.transaction.tick(lambda: self.scheduler.step(*args, **kwargs), is_last)

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


def is_scheduler(obj: Any) -> bool:
    """Anything with step and state_dict that is not an optimizer or model counts as a schedule."""
    if isinstance(obj, LRScheduler):
        return True
    return all(callable(getattr(obj, name, None)) for name in ("step", "state_dict", "load_state_dict"))
