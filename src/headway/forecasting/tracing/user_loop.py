"""Run the user's own training loop in a trace, and detect its phases from the functions that it calls."""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.core.training.forecast_types import Loop
from headway.errors import ConfigError
from headway.forecasting.tracing.engine import StepEngine, StepObserver
from headway.forecasting.tracing.recipe import StepRecipe, make_autocast
from headway.forecasting.tracing.reported_tensors import Batch, list_state, mark_batch


def run_loop(
    loop: Loop,
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[..., Batch],
    observer: StepObserver,
    engine: StepEngine,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Run the user's own training loop over the recipe's micro-batches.

    Args:
        loop: User's loop, called as `loop(model, batches, optimizer)`.
        model: Model to train.
        recipe: Configuration of the steps.
        batch: Function that returns the next micro-batch. It takes a sequence length if the recipe has lengths.
        observer: Observer of the steps.
        engine: Engine that distributes the model over ranks.
        optimizer: Optimizer to step, or None for no update.

    Raises:
        ConfigError: If the loop ends without calling backward, or makes fewer updates than the recipe requires.
    """
    phases = LoopPhases(observer, engine)

    def iterate_batches() -> Iterator[Batch]:
        for args in recipe.iterate_batch_args(engine.num_updates):
            phases.enter_phase("forward")
            yield mark_batch(batch(*args), observer)  # no name here, so that only the loop keeps the batch alive

    if optimizer is not None:
        _replace_step(optimizer, phases, engine)
    # The loop decides by itself when it accumulates, so gradients are reduced in every micro-batch.
    with phases, make_autocast(recipe.precision), engine.run_micro_batch(is_last=True):
        loop(model, iterate_batches(), optimizer)
    updates = recipe.count_updates(engine.num_updates)
    if not phases.has_backward or phases.num_updates < (0 if optimizer is None else updates):
        raise ConfigError(
            f"loop= was given {updates * recipe.accumulation} micro-batches and made {phases.num_updates} updates"
            f"{'' if phases.has_backward else ' and no backward'}; it must iterate over all of its batches, call backward on the "
            f"loss, and step the optimizer after every {recipe.accumulation}"
        )


class LoopPhases(TorchFunctionMode):
    """Torch function mode that detects the phases of a user's loop.

    A phase starts when the loop calls backward or the optimizer's step.

    Args:
        observer: Observer that is notified of the phases.
        engine: Engine that lists the gradients.

    Attributes:
        num_updates: Number of updates so far.
        has_backward: Whether the loop has called backward.
    """

    def __init__(self, observer: StepObserver, engine: StepEngine) -> None:
        super().__init__()
        self._observer = observer
        self._engine = engine
        self.num_updates = 0
        self.has_backward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        self.has_backward = True
        self._observer.mark_activations()
        self.enter_phase("backward")
        with torch.autocast("cpu", enabled=False):  # PyTorch recommends autocast for forward only
            result = func(*args, **(kwargs or {}))
        self._observer.mark_tensors(self._engine.list_gradients(), "gradients")
        return result

    def enter_phase(self, phase: str) -> None:
        """Notify the observer that a phase of the current update starts.

        Args:
            phase: "forward", "backward" or "update".
        """
        self._observer.enter_phase(f"step {self.num_updates + 1} {phase}")

    def record_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Report the optimizer's state tensors to the observer, and count the update."""
        self._observer.mark_tensors(list_state(optimizer), "optimizer state")
        self.num_updates += 1


def _replace_step(optimizer: torch.optim.Optimizer, phases: LoopPhases, engine: StepEngine) -> None:
    """Make `optimizer.step()` update the parameters through the engine, and report the update to `phases`.

    The engine itself calls the optimizer's original `step`, once or several times.

    Args:
        optimizer: Optimizer that the user's loop steps.
        phases: Phases of the loop.
        engine: Engine that makes the updates.
    """
    original_step, is_engine_stepping = optimizer.step, False

    def step_through_engine(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal is_engine_stepping
        if is_engine_stepping:
            return original_step(*([] if closure is None else [closure]))
        losses: list[Any] = []

        def evaluate_closure() -> Any:
            assert closure is not None
            losses.append(closure())
            return losses[-1]

        phases.enter_phase("update")
        is_engine_stepping = True
        try:
            engine.step_optimizer(optimizer, None if closure is None else evaluate_closure)
        finally:
            is_engine_stepping = False
        phases.record_update(optimizer)
        return losses[0] if losses else None

    # Schedulers expect a bound method.
    optimizer.step = MethodType(step_through_engine, optimizer)  # type: ignore[method-assign]
