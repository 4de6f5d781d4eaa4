"""Two updates of a model, by a loop that is known or by one of the user's own, told apart into phases."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.errors import ConfigError
from headway.forecasting.tracing.step import (
    STEPS,
    Batch,
    Loop,
    StepEngine,
    StepObserver,
    StepRecipe,
    as_on_cuda,
    autocast,
    mark_batch,
    mark_model,
    run_steps,
    state_of,
)


def run(
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[[], Batch],
    watcher: StepObserver | None = None,
    on_cuda: bool = False,
    engine: StepEngine | None = None,
) -> None:
    """Run two updates of a model.

    Args:
        model: its parameters lie where it computes.
        recipe: how.
        batch: gives the next micro-batch.
        watcher: is told what goes on.
        on_cuda: optimizers choose their kernels as they do for parameters on a card.
        engine: what spreads the model over ranks; None: it is alone.
    """
    watcher, engine = watcher or StepObserver(), engine or StepEngine(model)
    watcher.enter("set-up")
    mark_model(model, watcher)
    watcher.mark(engine.own(), "buckets")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = recipe.optimizer(parameters) if recipe.optimizer is not None else None
    if optimizer is not None and on_cuda:
        as_on_cuda(optimizer)
    if callable(recipe.loop):
        run_loop(recipe.loop, model, recipe, batch, watcher, engine, optimizer)
    else:
        run_steps(model, recipe, batch, watcher, engine, parameters, optimizer)
    watcher.enter("end")


class LoopPhases(TorchFunctionMode):
    """Tells an observer when a loop goes over from forward to backward and to the update.

    Args:
        watcher: is told.
        engine: knows the gradients.

    Attributes:
        num_updates: so far.
        has_backward: one was run.
    """

    def __init__(self, watcher: StepObserver, engine: StepEngine) -> None:
        super().__init__()
        self._watcher, self._engine = watcher, engine
        self.num_updates = 0
        self.has_backward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        self.has_backward = True
        self._watcher.mark_activations()
        self.enter("backward")
        with torch.autocast("cpu", enabled=False):  # around forward alone, as PyTorch asks for
            result = func(*args, **(kwargs or {}))
        self._watcher.mark(self._engine.gradients(), "gradients")
        return result

    def enter(self, phase: str) -> None:
        """A phase of the update that is under way."""
        self._watcher.enter(f"step {self.num_updates + 1} {phase}")

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        self._watcher.mark(state_of(optimizer), "optimizer state")
        self.num_updates += 1


def run_loop(
    loop: Loop,
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[[], Batch],
    watcher: StepObserver,
    engine: StepEngine,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Run a loop over the micro-batches of two updates.

    Raises:
        ConfigError: it ended without a backward, or without the updates of its batches.
    """
    phases = LoopPhases(watcher, engine)

    def batches() -> Iterator[Batch]:
        for _ in range(STEPS * recipe.accumulation):
            phases.enter("forward")
            yield _arrived(batch, watcher)  # held by the loop alone

    if optimizer is not None:
        optimizer.register_step_pre_hook(lambda *_: phases.enter("update"))
        optimizer.register_step_post_hook(lambda stepped, *_: phases.updated(stepped))
    with phases, autocast(recipe.precision), engine.micro_batch(is_last=True):
        loop(model, batches(), optimizer)
    wanted = 0 if optimizer is None else STEPS
    if not phases.has_backward or phases.num_updates < wanted:
        raise ConfigError(
            f"loop= was given {STEPS * recipe.accumulation} micro-batches and made {phases.num_updates} updates"
            f"{'' if phases.has_backward else ' and no backward'}; it must iterate over all of its batches, call backward on the "
            f"loss, and step the optimizer after every {recipe.accumulation}"
        )


def _arrived(batch: Callable[[], Batch], watcher: StepObserver) -> Batch:
    found = batch()
    mark_batch(found, watcher)
    return found
