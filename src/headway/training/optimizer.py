"""The prepared optimizer: steps when a window is closed, skips where there is nothing to learn, counts what happened."""

from collections.abc import Callable
from typing import Any

import torch

from headway.errors import PrepareError, UnsupportedError
from headway.log import get_logger
from headway.precision.base import Precision
from headway.runtime import phases
from headway.strategies.base import Strategy
from headway.training.accumulation import Accumulation
from headway.training.clock import Clock
from headway.training.unprepared import note_prepared, owner_of

log = get_logger(__name__)


class PreparedOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer; unknown attributes are the wrapped one's.

    An object of its own, not the user's with another class: schedulers made before prepare() have already bound the
    step of the original.

    Attributes:
        optimizer: the wrapped one.
        num_updates: how many of its steps happened.
        step_was_skipped: the last step() at a closed window made no update (fp16 overflow, a window of weight zero).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation, strategy: Strategy,
                 precision: Precision, clock: Clock) -> None:  # fmt: skip
        # Optimizer.__init__ would build a second set of groups and state: everything is delegated instead.
        self.optimizer = optimizer
        self.num_updates = 0
        self.step_was_skipped = False
        self.last_window_length = 1
        self._accumulation = accumulation
        self._strategy = strategy
        self._precision = precision
        self._clock = clock
        self._checked = -1
        note_prepared(optimizer, accumulation)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # asked for before __init__ (copy, pickle)
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy give the wrapped optimizer: a copy takes part in no run."""
        return _itself, (self.optimizer,)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For schedule-free optimizers."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """For schedule-free optimizers."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients at the end of a window or before its first backward; in between, nothing."""
        if self._accumulation.is_fresh:
            transaction = self._accumulation.transaction
            if transaction is not None:
                transaction.forget_gradients(self.optimizer)
            self._precision.discard(self.optimizer)
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the update at the end of a window; inside one, nothing.

        Raises:
            PrepareError: parameters that belong to no prepared model, where processes would drift apart.
        """
        accumulation = self._accumulation
        if not accumulation.is_final:
            if accumulation.will_step:
                log.warning_once(
                    "step() came at the end of a window whose last micro-batch ran no accelerator.backward(): its gradients are "
                    "not final, so no update was made; the window goes on. Is loss.backward() called instead?"
                )
            return
        if self._checked != accumulation.num_resets:
            self._check_parameters()
        window = accumulation.current
        phases.mark("step")
        did_step = not window.is_empty and self._make_step(closure)
        phases.mark("forward")
        self.step_was_skipped = not did_step
        window.is_applied = True
        if did_step:
            self.num_updates += 1
            self.last_window_length = window.num_done or 1
            self._clock.count(window.number)
        if accumulation.guard is not None and not window.is_empty:
            accumulation.guard.after_step(did_step, window.number, self._clock.num_updates + 1)

    def _make_step(self, closure: Callable[[], Any] | None) -> bool:
        transaction = self._accumulation.transaction
        is_permitted = self._accumulation.permits(self._clock.num_updates + 1)
        if transaction is None:
            return is_permitted and self._strategy.step(self.optimizer, self._precision, closure)
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) computes gradients of its own, which microbatching='auto' cannot take back; leave the "
                "closure out, or microbatching off"
            )
        # What is not permitted is voted on all the same: the batch is over.
        return transaction.step(
            self.optimizer, lambda: is_permitted and self._strategy.step(self.optimizer, self._precision, None)
        )

    def _check_parameters(self) -> None:
        self._checked = self._accumulation.num_resets
        if self._strategy.data_shard.count == 1:
            return
        known = {id(parameter) for parameters in self._accumulation.parameters.values() for parameter in parameters}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        owner = None if known.issuperset(map(id, every)) else owner_of(every)
        if owner is None:
            check_owned(self.optimizer, known)
        else:  # another Accelerator has prepared the model, and reduces its gradients
            self._strategy = owner.strategy


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def check_owned(optimizer: torch.optim.Optimizer, known: set[int]) -> None:
    """Every parameter of the optimizer must belong to a prepared model.

    Raises:
        PrepareError: some do not; the message counts them and gives their shapes.
    """
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise PrepareError(
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that belong to no prepared model (shapes {shapes}"
            f"{', ...' if len(strangers) > 3 else ''}). Prepare that model too, and build the optimizer from the very model "
            "that is prepared (not from a copy, nor before its layers were replaced)"
        )
