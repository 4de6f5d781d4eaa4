"""Prepared optimizer, which steps only when an accumulation window is closed, and counts updates.

A call of `step` in a training loop::

    step
        find the window in which the optimizer's models trained last
        return if it is not closed                    `_is_at_end` also reports misplaced calls
        `_apply_update`                               calls `TrainingStep.apply_update`; no update if the window has weight 0
        `_record_update`                              counts the update and notifies the hooks

`StepWatch` also checks the steps of optimizers that are not prepared. It is in this file, because each update calls it.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.common.callsite import find_call_site
from headway.core.runtime import process
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.training.prepared.exchanged_parameters import fit_state, repoint_parameters
from headway.core.training.prepared.low_bit import find_low_bit_extension
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.training.prepared.own_steps import StepMethodWatch
from headway.core.training.prepared.registry import AcceleratorRegistry
from headway.core.training.step import TrainingStep
from headway.core.training.windows import AccumulationWindow
from headway.errors import PrepareError, StateError
from headway.log import get_logger

log = get_logger(__name__)

_FOREIGN_BACKWARD = (
    "step() found gradients that accelerator.backward() did not compute. Instead of loss.backward(), write "
    "accelerator.backward(loss), which weights the loss, scales it under fp16 and knows when the window ends. Do not prepare an "
    "optimizer whose gradients you compute yourself"
)
_ZERO_GRAD_BEFORE_STEP = (
    "zero_grad() at %s came before step(): the gradient of a whole window was dropped without an update. Move zero_grad() below "
    "optimizer.step(), or above the backward; if the update is meant to be left out, this is no mistake"
)
_STEP_BEFORE_BACKWARD = (
    "step() at %s came at the end of a window whose last micro-batch has run no accelerator.backward(): its gradients are not "
    "final, so no update was made. Move accelerator.backward(loss) above this line, or add it where it is missing"
)
_WINDOW_LEFT = (
    "a window of %d micro-batches ended without step() and zero_grad() before the step() at %s, so its gradient is part of this "
    "update too. Call both in each micro-batch: they act at the end of a window, and wait until then"
)
_STEP_MISSED_AT_END = (
    "step() of %s at %s waited for the end of a window, and was not called there: that window made no update with it. Give the turn "
    "of each model a block of its own, accumulate(model) (docs/several_models.md), or call step() in each micro-batch"
)
_CLOSURE_IN_BLOCK = (
    "step(closure) came inside accumulate() before any backward: the window waits for a backward that only this step would "
    "make. Open the block in the closure, `def closure(): with accelerator.accumulate(model): ...`, and call step(closure) "
    "outside of it"
)
_STEPPED_BY_SCALER = (
    "a GradScaler steps %s, which is prepared: gradients are scaled twice, or divided before a window's end. Leave the scaler out: "
    "pass mixed_precision='fp16' to the Accelerator, give accelerator.backward() the loss as it is, and call optimizer.step()"
)
_STATE_IN_ENGINE = "its engine keeps that: use accelerator.save_state() and accelerator.load_state()"


class UpdateCounts(NamedTuple):
    """Attributes of a `PreparedOptimizer` that are restored when a batch is undone."""

    num_updates: int
    step_was_skipped: bool
    last_window_length: int


class PreparedOptimizer(torch.optim.Optimizer):
    """Wrapper around the user's optimizer. Attributes that it does not define are read from the wrapped optimizer.

    It is a separate object, because schedulers created before prepare() refer to the `step` of the user's optimizer.

    Args:
        optimizer: User's optimizer.
        step: Training step that makes updates.
        accelerators: Registry of the Accelerators of this process, because another of them may have prepared the model.
        rank_check: Check that raises an error if only some ranks make a call. It runs before sharded state is read or
            loaded. Default: None, no check.

    Attributes:
        optimizer: Wrapped optimizer.
        num_updates: Number of updates that it has made.
        step_was_skipped: Whether the last step() at a closed accumulation window made no update. The cause is an fp16
            overflow, a window of weight 0, or a guard that refused the update.
        last_window_length: Number of micro-batches in the accumulation window of its last update.
    """

    _step_supports_amp_scaling = True
    """Flag for torch's GradScaler, which then passes its scale to step() and leaves the gradients unchanged."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: TrainingStep,
        accelerators: AcceleratorRegistry,
        rank_check: RankConditionalCallCheck | None = None,
    ) -> None:
        # Optimizer.__init__ would build a second set of groups and state: everything is delegated instead.
        self.optimizer = optimizer
        self._step_methods = StepMethodWatch(optimizer)
        self.num_updates = 0
        self.step_was_skipped = False
        self.last_window_length = 1
        self._step = step
        self._windows = step.windows
        self._strategy = step.strategy
        self._accelerators = accelerators
        self._rank_check = rank_check
        self._checked_num_resets = -1  # `num_resets` of the registry when the parameters were last checked
        # Numbers of the accumulation windows of its last update (even if it was skipped), and of its last call of step().
        self._last_update_window = -1
        self._last_call_window = -1
        # Whether step() came at the end of a window, before the window's last backward.
        self._was_step_too_early = False
        accelerators.record_preparer(optimizer, step)

    # ---------------------------------------------------------------- step and zero_grad

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer at the end of an accumulation window. Do nothing inside a window.

        No update is made either if the window has a loss weight of 0, or if the guard or an fp16 overflow forbids it.

        Args:
            closure: Closure as for a torch optimizer. Default: None.

        Returns:
            The closure's first return value, which torch's optimizers return, too. None if the closure did not run.

        Raises:
            PrepareError: In a run on several processes, if parameters belong to no prepared model.
            StateError: If gradients did not come from `accelerator.backward`, if no `accumulate` block has named this
                optimizer's models since its last step, if a GradScaler that the script created makes the call, or if a
                closure is passed inside an `accumulate` block before any backward. Also if ranks have diverged.
            NonFiniteError: If a loss or gradient is not finite, and `on_non_finite` requests an error.
        """
        step, windows = self._step, self._windows
        if "grad_scale" in self.__dict__:  # torch's GradScaler sets this attribute before it calls step()
            raise StateError(_STEPPED_BY_SCALER % type(self.optimizer).__name__)
        window = step.find_window_of_optimizer(self.optimizer)
        if window is None or (window is not windows.current and window.number == self._last_update_window):
            raise StateError(self._describe_missing_models())
        if step.weighs_losses:
            self._warn_of_missed_steps(window)
        self._last_call_window = window.number
        # Gradients of a window that a backward has closed are final. Other cases need a closer check.
        is_final = window.is_closed and not windows.are_steps_disabled and window.number > 0
        if not is_final and not self._is_at_end(window, closure):
            return None
        if self._checked_num_resets != step.prepared.num_resets:
            self._check_parameters()
        recorder = None if closure is None else _ClosureRecorder(closure, self._choose_loss_average())
        did_step = self._apply_update(window, recorder)
        # If the batch was replayed within the update, the window may be another one.
        window = step.find_window_of_optimizer(self.optimizer) or window
        self._record_update(window, did_step)
        if not window.is_discarded and (step.guard.can_refuse_updates or not did_step):
            step.guard.after_step(window, did_step)
        return None if recorder is None else recorder.first_result

    def _choose_loss_average(self) -> Callable[[float], float] | None:
        """Return a function that averages a closure's loss over the ranks, or None if no average is needed.

        Only LBFGS on several ranks needs it. LBFGS compares losses to choose its steps and to end its iterations. With
        different losses, ranks would decide differently, and then wait for each other in different collectives. Under local
        SGD, each rank decides for itself. The returned function is a collective.
        """
        everyone = self._strategy.everyone
        is_local = everyone.world_size == 1 or self._strategy.trains_locally()
        if is_local or not isinstance(self.optimizer, torch.optim.LBFGS):
            return None

        def average(loss: float) -> float:
            return sum(row[0] for row in everyone.gather_numbers([loss])) / everyone.world_size

        return average

    def _warn_of_missed_steps(self, window: AccumulationWindow) -> None:
        """Warn once if an earlier accumulation window of the optimizer's models ended without a call to step().

        Args:
            window: Window in which the optimizer's models trained last.
        """
        if window.has_leftover_gradients:
            log.warning_once(_WINDOW_LEFT, self._windows.num_steps, find_call_site())
        elif not self._was_step_too_early and self._last_call_window not in (self._last_update_window, window.number):
            log.warning_once(_STEP_MISSED_AT_END, type(self.optimizer).__name__, find_call_site())

    def _is_at_end(self, window: AccumulationWindow, closure: Callable[[], Any] | None) -> bool:
        """Whether a call to step() comes at the end of an accumulation window, so that it may update the parameters.

        If it comes in the last micro-batch but before a backward, warn once, because no update will be made. If the
        script may run backward itself, the call closes the window.

        Args:
            window: Window in which the optimizer's models trained last.
            closure: Closure that was passed to step(), or None.

        Raises:
            StateError: If gradients come from a backward outside `Accelerator.backward`, or if a closure is passed
                inside an `accumulate` block in which no backward has run yet.
        """
        windows = self._windows
        if windows.can_step(window):
            # The first step of a started or resumed run comes after a backward, or has one in its closure.
            is_first = not window.number and bool(self._step.prepared.models)
            if is_first and closure is None and self._has_foreign_gradients():
                raise StateError(_FOREIGN_BACKWARD)
            return True
        if windows.is_inside and window.micro_weight is None:
            if closure is not None:
                raise StateError(_CLOSURE_IN_BLOCK)
            if not window.has_gradient and self._has_foreign_gradients():
                raise StateError(_FOREIGN_BACKWARD)
        elif window.micro_weight is not None:
            window.was_step_called_early = True
        is_due = windows.is_step_due and window is windows.current
        if is_due and not self._step.weighs_losses:
            window.close(1.0)
            return True
        if is_due:
            log.warning_once(_STEP_BEFORE_BACKWARD, find_call_site())
            self._was_step_too_early = True
        return False

    def _apply_update(self, window: AccumulationWindow, closure: Callable[[], Any] | None) -> bool:
        """Make the update, unless the window has a loss weight of 0. Return whether the parameters were updated.

        After an error, restore the random generators that an optimizer with low-bit states uses.

        Args:
            window: Closed accumulation window in which the optimizer's models trained last.
            closure: Closure as for a torch optimizer, or None.
        """
        step = self._step
        for listener in step.hooks.phases:
            listener("step")
        did_step = False
        if window.is_discarded:
            step.run.clock.count_without_weight(window.number)
        else:
            try:
                did_step = step.apply_update(self.optimizer, window, self._strategy, closure)
            except BaseException:
                low_bit = find_low_bit_extension(self.optimizer)
                # Its post hook would restore the generators, but torch calls no post hooks after an error.
                if low_bit is not None:
                    low_bit.restore_generators(self.optimizer)
                raise
        for listener in step.hooks.phases:
            listener("forward")
        return did_step

    def _record_update(self, window: AccumulationWindow, did_step: bool) -> None:
        """Record that the optimizer is done with an accumulation window, and count and announce the update.

        Args:
            window: Window whose gradients were applied.
            did_step: Whether the parameters were updated.
        """
        self.step_was_skipped = not did_step
        window.is_applied = True
        self._last_update_window = window.number
        self._last_call_window = window.number
        self._was_step_too_early = False
        if did_step:
            self.num_updates += 1
            self.last_window_length = window.num_done or 1
            self._step.run.clock.count_update(window.number)
            for notify_update in self._step.hooks.updated:
                notify_update(self.optimizer, window.number)

    def has_stepped_in(self, window_number: int) -> bool:
        """Whether the optimizer has stepped at the end of this accumulation window, even if the update was skipped."""
        return window_number == self._last_update_window

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are part of an unfinished accumulation window.

        Warn once if the gradients of a complete window are cleared before an optimizer stepped on them. If the loss
        policy gives losses constant factors, the gradients are cleared only in the last micro-batch of a window.

        Args:
            set_to_none: Whether to set gradients to None instead of zero. Default: True.
        """
        step, windows = self._step, self._windows
        window = step.find_window_of_optimizer(self.optimizer)
        if not step.weighs_losses:
            # The script may run backward itself, so whether the window has a gradient is not known.
            may_clear = windows.is_step_due
        elif window is None:
            may_clear = True
        else:
            may_clear = (window.is_closed or not window.has_gradient) and not windows.are_steps_disabled
        if may_clear:
            # After step() the window is applied, and nothing is lost.
            if window is not None and not window.is_applied and window.is_closed and window.has_pending_gradients:
                self._warn_of_lost_gradients(window)
            step.clear_gradients(self.optimizer, set_to_none)
        elif window is not None and window.micro_weight is not None:
            window.was_step_called_early = True

    def _warn_of_lost_gradients(self, window: AccumulationWindow) -> None:
        """Warn that `zero_grad()` drops gradients of a complete accumulation window on which no optimizer stepped.

        Mark the window as applied, so that it counts as finished. Do nothing if this optimizer has no gradients.
        """
        if self._list_weighed_gradients():
            if not self._was_step_too_early:  # the warning _STEP_BEFORE_BACKWARD has already named the mistake
                log.warning_once(_ZERO_GRAD_BEFORE_STEP, find_call_site())
            window.is_applied = True

    def _has_foreign_gradients(self) -> bool:
        """Whether any gradient of the optimizer has a nonzero element.

        Called only if `accelerator.backward` has computed no gradient, so that another backward must have done so.
        """
        return any(bool(grad.count_nonzero()) for grad in self._list_weighed_gradients())

    def _list_weighed_gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients of the optimizer's parameters, shards if they are sharded.

        The list is empty if the loss policy allows the script to run backward itself.
        """
        if not self._step.weighs_losses:
            return []
        return self._strategy.get_local_gradients(iterate_parameters(self.optimizer))

    def _describe_missing_models(self) -> str:
        """Return the error message for a step() although no accumulation window has trained the optimizer's models."""
        model_ids = self._step.turns.find_owners(iterate_parameters(self.optimizer))
        own = ", ".join(type(model).__name__ for model in self._step.prepared.models if id(model) in model_ids)
        current = ", ".join(type(model).__name__ for model in self._windows.current.models)
        if not all(isinstance(model, torch.nn.Module) for model in self._windows.current.models):
            return f"accumulate() got {current}, which is not a model; write accumulate(model) (docs/several_models.md)"
        return (
            f"{type(self.optimizer).__name__} of {own} steps, but no accumulate() block has named {own} since its last step, and "
            f"a backward in accumulate({current}) leaves nothing in other models. For a loss that trains both, name both: "
            f"accumulate({current}, {own}) (docs/several_models.md)"
        )

    # ---------------------------------------------------------------- the wrapped optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Default options of the wrapped optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # requested before __init__ (by copy or pickle)
            raise AttributeError(name)
        return self._step_methods.wrap_method(name, getattr(self.optimizer, name))

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make pickle and deepcopy create a plain optimizer, because a copy is not part of the run."""
        return _return_unchanged, (self.optimizer,)

    def train(self) -> None:
        """Switch a schedule-free optimizer to training mode. Other optimizers ignore the call."""
        self._strategy.call_optimizer(self.optimizer, "train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation mode. Other optimizers ignore the call."""
        self._strategy.call_optimizer(self.optimizer, "eval")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer. Parameters that sharding has replaced are exchanged in it."""
        self.optimizer.add_param_group(param_group)
        self._checked_num_resets = -1
        repoint_parameters(self.optimizer, self._strategy)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict.

        Raises:
            UnsupportedError: If an engine such as DeepSpeed keeps the state itself, or if the state is sharded and only
                some ranks make the call.
        """
        self._check_state_access("state_dict() is asked for")
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict. Full tensors in it are sharded like their parameters.

        Raises:
            UnsupportedError: If an engine such as DeepSpeed keeps the state itself, or if the state is sharded and only
                some ranks make the call.
        """
        self._check_state_access("load_state_dict() is called")
        self.optimizer.load_state_dict(state_dict)
        fit_state(self.optimizer, self._strategy)

    def _check_state_access(self, call: str) -> None:
        """Raise an error if the state cannot be read or loaded here.

        Args:
            call: Call that needs the state, for messages, such as "state_dict() is asked for".

        Raises:
            UnsupportedError: If an engine such as DeepSpeed keeps the state itself, or if the state is sharded and only
                some ranks make the call.
        """
        self._strategy.capabilities.require("optimizer_state", self._strategy.name, _STATE_IN_ENGINE)
        if self._rank_check is not None:
            self._rank_check.check(
                f"{type(self.optimizer).__name__}'s {call}", "the state of an optimizer (accelerator.save_state())"
            )

    # ---------------------------------------------------------------- owners of the parameters

    def _check_parameters(self) -> None:
        """Check that prepared models own all parameters. If another Accelerator prepared them, use its strategy.

        Do nothing in a single-process run.

        Raises:
            PrepareError: If some parameters belong to no prepared model.
        """
        prepared = self._step.prepared
        self._checked_num_resets = prepared.num_resets
        if self._strategy.everyone.world_size == 1:
            return
        prepared_ids = prepared.list_ids()
        parameters = list(iterate_parameters(self.optimizer))
        owner = None if prepared_ids.issuperset(map(id, parameters)) else self._accelerators.find_owner(parameters)
        if owner is None:
            self.check_owned(prepared_ids)
        else:  # another Accelerator has prepared the model, and reduces its gradients
            self._strategy = owner.strategy
            repoint_parameters(self.optimizer, self._strategy)

    def check_owned(self, prepared_ids: set[int]) -> None:
        """Raise an error unless every parameter belongs to a prepared model.

        Args:
            prepared_ids: IDs of the parameters of prepared models.

        Raises:
            PrepareError: If some parameters belong to no prepared model. The message gives their number and shapes.
        """
        unowned = [p for p in iterate_parameters(self.optimizer) if id(p) not in prepared_ids]
        if unowned:
            shapes = ", ".join(str(tuple(p.shape)) for p in unowned[:3])
            raise PrepareError(
                f"{type(self.optimizer).__name__} has {len(unowned)} parameters that belong to no prepared model (shapes "
                f"{shapes}{', ...' if len(unowned) > 3 else ''}). Prepare that model too, and build the optimizer from exactly "
                "the model that is prepared (not from a copy, and not before its layers were replaced). Add layers and adapters "
                "before prepare()"
                + ("" if prepared_ids else "; after end_training() or free_memory() nothing is prepared any more")
            )

    # ---------------------------------------------------------------- resume and replay

    def resume(self, num_updates: int) -> None:
        """Continue the count of updates from a checkpoint, and forget the accumulation windows before it.

        Each load of a checkpoint calls this method.

        Args:
            num_updates: Number of updates that the optimizer had made when the checkpoint was saved.
        """
        self.num_updates = num_updates
        self._last_update_window = self._last_call_window = -1
        self._was_step_too_early = False

    def snapshot(self) -> UpdateCounts:
        """Return the state that `restore` needs to undo a batch."""
        return UpdateCounts(self.num_updates, self.step_was_skipped, self.last_window_length)

    def restore(self, snapshot: UpdateCounts) -> None:
        """Restore the counts of updates from a snapshot, which can be restored several times."""
        self.num_updates = snapshot.num_updates
        self.step_was_skipped = snapshot.step_was_skipped
        self.last_window_length = snapshot.last_window_length


def _return_unchanged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


class StepWatch:
    """torch hook that checks every optimizer step in this process, whether or not the optimizer is prepared.

    Args:
        accelerators: Registry of the Accelerators. No optimizer may step on their unfinished accumulation windows.
        check_first_step: Function that is called before the first step of each optimizer, with the optimizer and whether the
            step has a closure.
    """

    def __init__(
        self, accelerators: AcceleratorRegistry, check_first_step: Callable[[torch.optim.Optimizer, bool], None]
    ) -> None:
        self._accelerators = accelerators
        self._check_first_step = check_first_step
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        process.release_at_end(self.release)

    def release(self) -> None:
        """Remove the hook from torch."""
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise an error if an optimizer is about to step on incomplete gradients, and check its first step.

        torch calls this before each optimizer's step.

        Args:
            optimizer: torch's own optimizer.
            args: Positional arguments of its `step`, of which the first is the optimizer itself.
            kwargs: Keyword arguments of its `step`.

        Raises:
            StateError: If the gradient covers only part of an accumulation window, or if `check_first_step` raises it.
        """
        for reference in self._accelerators.members:
            registration = reference()
            if registration is None or registration.step.windows.current.is_closed:
                continue  # the usual case: all backwards of the window came before the step
            if registration.step.windows.has_partial_gradients:
                _check_unaffected(optimizer, registration.step)
        if optimizer not in self._have_stepped:
            self._have_stepped.add(optimizer)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._check_first_step(optimizer, closure is not None)


def _check_unaffected(optimizer: torch.optim.Optimizer, step: TrainingStep) -> None:
    """Raise `StateError` if the optimizer holds parameters that train in the unfinished accumulation window.

    Args:
        optimizer: Optimizer that is about to step.
        step: Training step whose current window is unfinished.
    """
    trained_ids = {id(parameter) for parameter in step.prepared.list_parameters_of(step.windows.current)}
    find_current = step.strategy.find_current
    if any(id(find_current(p)) in trained_ids for p in iterate_parameters(optimizer)):
        raise StateError(
            f"{type(optimizer).__name__} stepped inside an accumulation window, on a part of its gradient. Only an optimizer "
            "that the same Accelerator has prepared waits for the window's end: prepare it together with its model, and call "
            "step() on what prepare() returned"
        )


class _ClosureRecorder:
    """Closure that keeps the first return value of another closure. It accepts the same arguments.

    An optimizer may call its closure several times, as LBFGS does. torch's optimizers return the value of the first call.

    Args:
        closure: Closure of the user.
        average: Function that averages the closure's losses over the ranks, so that the optimizer gets their mean.
            None: the optimizer gets what the closure returns.

    Attributes:
        first_result: Return value of the first call, or None before it.
    """

    def __init__(self, closure: Callable[[], Any], average: Callable[[float], float] | None) -> None:
        self.first_result: Any = None
        self._closure = closure
        self._average = average
        self._was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._closure(*args, **kwargs)
        if not self._was_called:
            self._was_called = True
            self.first_result = result
        return result if self._average is None else self._average(float(result))
