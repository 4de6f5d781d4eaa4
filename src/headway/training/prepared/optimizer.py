"""The prepared optimizer: takes up sharded parameters, steps when a window is closed, skips where nothing was learnt, counts.

Optimizers created before prepare() hold the original parameters: a strategy that shards replaces them.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.errors import PrepareError, StateError
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.control_plane.attendance import RankConditionalCallCheck
from headway.strategies.base import Strategy
from headway.training.prepared.objects import held_by
from headway.training.prepared.registry import AcceleratorRegistry
from headway.training.step import TrainingStep
from headway.training.windows import AccumulationWindow

log = get_logger(__name__)

_OTHER_BACKWARD = (
    "step() found gradients that accelerator.backward() has not made. Was loss.backward() called? Write "
    "accelerator.backward(loss): it weighs the loss, scales it under fp16 and knows when the window ends. Do not prepare an "
    "optimizer whose gradients you make yourself"
)
_NO_STEP = (
    "zero_grad() came before step(): the gradient of a whole window was dropped without an update. Call step() first; if the update "
    "is meant to be left out, this is no mistake"
)
_LEFT = (
    "a window of %d micro-batches ended without step() and zero_grad(), so its gradient is part of the next update too. Call both in "
    "each micro-batch: they act at the end of a window, and wait until then"
)
_MISSED = (
    "step() of %s waited for the end of a window, and was not called there: that window made no update with it. Give the turn of "
    "each model a block of its own, accumulate(model) (docs/several_models.md), or call step() in each micro-batch"
)
_CLOSURE = (
    "step(closure) came inside accumulate() before any backward: the window waits for a backward that only this step would "
    "make. Open the block in the closure, `def closure(): with accelerator.accumulate(model): ...`, and call step(closure) "
    "outside of it"
)
_SCALER = (
    "a GradScaler steps %s, which is prepared: gradients are scaled twice, or divided before a window's end. Leave the scaler out: "
    "pass mixed_precision='fp16' to the Accelerator, give accelerator.backward() the loss as it is, and call optimizer.step()"
)
_BY_CHECKPOINT = "its engine keeps that: use accelerator.save_state() and accelerator.load_state()"


class PreparedOptimizer(torch.optim.Optimizer):
    """Wraps the user's optimizer; unknown attributes are the wrapped one's.

    An object of its own, not the user's with another class: schedulers made before prepare() have already bound the
    step of the original.

    Args:
        optimizer: the user's.
        step: makes updates.
        neighbours: the other Accelerators of this process, one of which may have prepared the model.
        looks: told before its state is asked for or set, where this process holds a part of it.

    Attributes:
        optimizer: the wrapped one.
        num_updates: how many of its steps happened.
        step_was_skipped: did the last step() at a closed window make no update (fp16 overflow, a window of weight zero)?
        last_window_length: micro-batches of the window that its last update was made from.
    """

    _step_supports_amp_scaling = True
    """Torch's word for: a GradScaler calls step() with its scale set here, and leaves the gradients alone."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: TrainingStep,
        neighbours: AcceleratorRegistry,
        looks: RankConditionalCallCheck | None = None,
    ) -> None:
        # Optimizer.__init__ would build a second set of groups and state: everything is delegated instead.
        self.optimizer = optimizer
        self.num_updates, self.step_was_skipped, self.last_window_length = 0, False, 1
        self._step = step
        self._windows = step.windows
        self._strategy = step.strategy
        self._neighbours = neighbours
        self._looks = looks
        self._checked = -1
        self._last_window = self._asked_in = -1  # windows: of its last update, of its last step()
        neighbours.note_prepared(optimizer, step)

    def resume(self, num_updates: int) -> None:
        """Go on from so many updates."""
        self.num_updates = num_updates

    def snapshot(self) -> Any:
        """What `restore` needs to take a batch back."""
        return self.num_updates, self.step_was_skipped, self.last_window_length

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, which stays good."""
        self.num_updates, self.step_was_skipped, self.last_window_length = snapshot

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
        self._checked = -1
        repoint(self.optimizer, self._strategy)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state.

        Raises:
            UnsupportedError: an engine keeps it elsewhere, or each rank has a part of it, and only some ask.
        """
        self._require_state("state_dict() is asked for")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state.

        Raises:
            UnsupportedError: an engine keeps it elsewhere, and would not see it; or only some ranks load their part.
        """
        self._require_state("load_state_dict() is called")
        self.optimizer.load_state_dict(state_dict)
        fit_state(self.optimizer, self._strategy)

    def _require_state(self, call: str) -> None:
        self._strategy.capabilities.require("optimizer_state", self._strategy.name, _BY_CHECKPOINT)
        if self._looks is not None:
            self._looks.check(
                f"{type(self.optimizer).__name__}'s {call}", "the state of an optimizer (accelerator.save_state())"
            )

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
        windows = self._windows
        window = self._window()
        if windows.is_due if not self._step.weighs_losses else window is None or windows.may_clear(window):
            if window is not None and window.is_waiting and window.is_closed and self._weighed_gradients():
                log.warning_once(_NO_STEP)
                window.is_applied = True
            self._step.drop(self.optimizer, set_to_none)
        elif window is not None and window.micro_weight is not None:
            window.was_asked = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the update at the end of a window; inside one, nothing.

        Raises:
            PrepareError: parameters that belong to no prepared model, where processes would drift apart.
            StateError: gradients that did not come from `accelerator.backward`, or from the models of this optimizer.
        """
        step = self._step
        if "grad_scale" in self.__dict__:
            raise StateError(_SCALER % type(self.optimizer).__name__)
        window = self._window()
        if window is None or (window is not self._windows.current and window.number == self._last_window):
            raise StateError(self._left_out())
        if window.was_left and self._step.weighs_losses:
            log.warning_once(_LEFT, self._windows.num_steps)
        elif self._asked_in not in (self._last_window, window.number) and step.weighs_losses:
            log.warning_once(_MISSED, type(self.optimizer).__name__)
        self._asked_in = window.number
        if not self._is_final(window, closure):
            return
        if self._checked != step.prepared.num_resets:
            self._check_parameters()
        phases = step.moments.phases
        for listener in phases:
            listener("step")
        did_step = not window.is_empty and step.update(self.optimizer, self._strategy, closure)
        for listener in phases:
            listener("forward")
        # Where the batch was run again within the update, there may be another window.
        window = self._window() or window
        self.step_was_skipped = not did_step
        window.is_applied = True
        self._last_window = self._asked_in = window.number
        if did_step:
            self.num_updates += 1
            self.last_window_length = window.num_done or 1
            step.parts.clock.count(window.number)
        if not window.is_empty:
            step.guard.after_step(did_step)

    def _window(self) -> AccumulationWindow | None:
        """The one that its models have learned in last."""
        step = self._step
        return step.turns.window_of(self.optimizer) if step.are_several else self._windows.current

    def _is_final(self, window: AccumulationWindow, closure: Callable[[], Any] | None) -> bool:
        """May it step? Looks for gradients that cannot be those of the window.

        Raises:
            StateError: there are some.
        """
        windows = self._windows
        if windows.may_step(window):
            # The first step of a run comes after a backward, or has one in its closure.
            is_first = not windows.num_windows and bool(self._step.prepared.models)
            if is_first and closure is None and self._has_foreign_gradients():
                raise StateError(_OTHER_BACKWARD)
            return True
        if windows.is_inside and window.micro_weight is None:
            if closure is not None:
                raise StateError(_CLOSURE)
            if not window.has_gradient and self._has_foreign_gradients():
                raise StateError(_OTHER_BACKWARD)
        elif window.micro_weight is not None:
            window.was_asked = True
        is_due = windows.is_due and window is windows.current
        if is_due and not self._step.weighs_losses:
            window.close(1.0)
            return True
        if is_due:
            log.warning_once(
                "step() came at the end of a window whose last micro-batch ran no accelerator.backward(): its gradients are "
                "not final, so no update was made; the window goes on"
            )
        return False

    def _has_foreign_gradients(self) -> bool:
        """Are there gradients although accelerator.backward has made none?"""
        return any(bool(grad.count_nonzero()) for grad in self._weighed_gradients())

    def _weighed_gradients(self) -> list[torch.Tensor]:
        """What this rank holds of the gradients; none where a backward of the script's own is as good as any."""
        return self._strategy.local_gradients(held_by(self.optimizer)) if self._step.weighs_losses else []

    def _left_out(self) -> str:
        models = self._step.turns.models_of(held_by(self.optimizer))
        own = ", ".join(type(model).__name__ for model in self._step.prepared.models if id(model) in models)
        given = ", ".join(type(model).__name__ for model in self._windows.current.models)
        return (
            f"{type(self.optimizer).__name__} of {own} steps, but no accumulate() block has named {own} since its last step, and "
            f"a backward in accumulate({given}) leaves nothing in other models. For a loss that trains both, name both: "
            f"accumulate({given}, {own}) (docs/several_models.md)"
        )

    def _check_parameters(self) -> None:
        prepared = self._step.prepared
        self._checked = prepared.num_resets
        if self._strategy.everyone.world_size == 1:
            return
        known = prepared.ids()
        every = list(held_by(self.optimizer))
        owner = None if known.issuperset(map(id, every)) else self._neighbours.owner_of(every)
        if owner is None:
            self.check_owned(known)
        else:  # another Accelerator has prepared the model, and reduces its gradients
            self._strategy = owner.strategy
            repoint(self.optimizer, self._strategy)

    def check_owned(self, known: set[int]) -> None:
        """Every parameter must belong to a prepared model.

        Args:
            known: the ids of theirs.

        Raises:
            PrepareError: some do not; the message counts them and gives their shapes.
        """
        strangers = [p for p in held_by(self.optimizer) if id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise PrepareError(
                f"{type(self.optimizer).__name__} holds {len(strangers)} parameters that belong to no prepared model (shapes "
                f"{shapes}{', ...' if len(strangers) > 3 else ''}). Prepare that model too, and build the optimizer from the very "
                "model that is prepared (not from a copy, nor before its layers were replaced)"
            )


class StepWatch:
    """Every step of any optimizer in this process passes here, prepared or not, by torch's own hook.

    Args:
        neighbours: the Accelerators whose windows are looked after.
        judge: looks at an optimizer that steps for the first time.
    """

    def __init__(self, neighbours: AcceleratorRegistry, judge: Callable[[torch.optim.Optimizer], None]) -> None:
        self._neighbours = neighbours
        self._judge = judge
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        process.at_end(self.release)

    def release(self) -> None:
        """Look no longer."""
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step.

        Raises:
            StateError: on a part of a window's gradient, or on gradients that are scaled.
        """
        for reference in self._neighbours.members:
            member = reference()
            if member is not None and member.step.windows.is_partial:
                _check_apart(optimizer, member.step)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._judge(optimizer)


def _check_apart(optimizer: torch.optim.Optimizer, step: TrainingStep) -> None:
    """The optimizer must not step on what learns in the window in progress."""
    learning = {id(parameter) for parameter in step.prepared.parameters_of(step.windows.current)}
    current = step.strategy.current
    if any(id(current(p)) in learning for p in held_by(optimizer)):
        raise StateError(
            f"{type(optimizer).__name__} stepped inside an accumulation window, on a part of its gradient. Only an optimizer "
            "that the same Accelerator has prepared waits for the window's end: prepare it together with its model, and call "
            "step() on what prepare() returned"
        )


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def repoint(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Let an optimizer of torch's hold the parameters as they are now, and its state, cut like them; said once.

    Groups keep their lists: an optimizer may hold one of them elsewhere too (LBFGS does).

    Args:
        optimizer: the user's.
        strategy: by which the parameters' model was set up.
    """
    num_exchanged = 0
    for group in optimizer.param_groups:
        given = group["params"]
        now = [strategy.current(parameter) for parameter in given]
        for old, new in zip(given, now):
            if new is not old:
                num_exchanged += 1
                if old in optimizer.state:
                    optimizer.state[new] = _cut(optimizer.state.pop(old), old.shape, new, strategy)
        if any(new is not old for old, new in zip(given, now)):
            given[:] = now
    if num_exchanged:
        log.info_once(
            "%s was created before prepare(): %d of its parameters were replaced by the prepared ones",
            type(optimizer).__name__,
            num_exchanged,
        )


def fit_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Cut whole tensors in the state, as `load_state_dict` may have put them there, like the parameters they belong to."""
    if strategy.capabilities.whole_gradients:
        return
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = _cut(state, parameter.shape, parameter, strategy)


def _cut(state: Any, shape: torch.Size, parameter: torch.Tensor, strategy: Strategy) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        name: strategy.cut(value, parameter)
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape
        else value
        for name, value in state.items()
    }
