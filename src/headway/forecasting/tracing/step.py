"""The training step that a forecast traces: forward, loss, backward, clipping, update, twice; it runs on real tensors too.

Two updates of a model, by a loop that is known or by one of the user's own, told apart into phases.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from headway.config.values import check_count
from headway.errors import ConfigError, LossError
from headway.forecasting.tracing.tensors import plain, scales_of

Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batch = Any
Loop = Callable[[nn.Module, Iterable[Batch], torch.optim.Optimizer | None], object]
"""A loop of the user's own: model, micro-batches and optimizer in."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("no", *_HALF)
STEPS = 2
"""An optimizer makes its state in the first step, so the first alone is not what the others are."""


LOOPS = ("plain", "zero_grad_before_backward", "loss_function")


def check_precision(precision: str) -> None:
    """Raise ConfigError unless steps can be traced in it."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r}; allowed: {', '.join(PRECISIONS)}")


@dataclass(frozen=True)
class StepRecipe:
    """How a step is made.

    Attributes:
        optimizer: makes the optimizer from the parameters that learn; None: no update.
        loss: from outputs and targets; None: the model returns its loss.
        precision: "no", "bf16" or "fp16", by autocast; "fp16" scales the loss.
        accumulation: micro-batches of one update.
        max_norm: gradients are clipped to it; None: they are not.
        keeps_gradients: `zero_grad(set_to_none=False)`: their memory is kept from step to step.
        loop: what holds memory between the calls. "plain": a loop's names, outputs and loss among them, keep their values until they
            are assigned again, and gradients go after the update. "zero_grad_before_backward": the same, but gradients go between
            forward and backward. "loss_function": a function computes the loss, and outputs go when it returns. Or the loop itself.
        lengths: of one micro-batch after the other, each of which is then asked for with its length; empty: all are alike.
    """

    optimizer: MakeOptimizer | None
    loss: Loss | None = None
    precision: str = "no"
    accumulation: int = 1
    max_norm: float | None = None
    keeps_gradients: bool = False
    loop: str | Loop = "plain"
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if callable(self.loop) and self.max_norm is not None:
            raise ConfigError(
                f"max_norm={self.max_norm!r} and your own loop: the loop clips its gradients itself; leave max_norm out"
            )
        if not callable(self.loop) and self.loop not in LOOPS:
            raise ConfigError(
                f"loop={self.loop!r}; allowed: {', '.join(LOOPS)}, or a function (model, batches, optimizer)"
            )
        check_count(accumulation=self.accumulation)
        if self.lengths and (len(self.lengths) % self.accumulation or self.updates() < STEPS or min(self.lengths) < 1):
            raise ConfigError(
                f"lengths: {len(self.lengths)} of them, the smallest {min(self.lengths)}; give those of {STEPS} or more whole "
                f"updates of {self.accumulation} micro-batch(es) each, all of 1 or more"
            )

    def updates(self, steps: int = STEPS) -> int:
        """How many are traced; so many where all batches are alike."""
        return len(self.lengths) // self.accumulation if self.lengths else steps

    def asked(self, steps: int = STEPS) -> Iterator[tuple[int, ...]]:
        """What each micro-batch is asked for: its length, or nothing."""
        yield from ((length,) for length in self.lengths) if self.lengths else [()] * (steps * self.accumulation)


class StepObserver:
    """Is told where the step is; this one does nothing with it."""

    def enter(self, phase: str) -> None:
        """What follows belongs to this phase."""

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """These tensors are of that kind."""

    def mark_activations(self) -> None:
        """Forward has ended."""


class StepEngine:
    """What spreads a step over ranks; this one is for one process with a whole model.

    Args:
        model: whose gradients.
    """

    steps = STEPS
    """Updates until one asks for the same memory as all that follow."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def modes(self) -> Iterable[AbstractContextManager[Any]]:
        """In which the step runs."""
        return ()

    def own(self) -> list[torch.Tensor]:
        """What it holds beside the model from the beginning."""
        return []

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one; only the window's last lets gradients travel."""
        return nullcontext()

    def gradients(self) -> list[torch.Tensor]:
        """This rank's, those included that wait for the window's end."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def clip(self, max_norm: float) -> None:
        """Scale them down to this norm, as torch's clip_grad_norm_ does with foreach, which it refuses for tensors on a CPU."""
        gradients = self.gradients()
        if not gradients:
            return
        norms = torch._foreach_norm(gradients, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))


def run_steps(
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[..., Batch],
    watcher: StepObserver,
    engine: StepEngine,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """The updates of one of `LOOPS`; see `StepRecipe`."""
    asked = recipe.asked(engine.steps)
    clears_late, is_function = recipe.loop == "zero_grad_before_backward", recipe.loop == "loss_function"
    held: Batch = None
    outputs: Any = None
    loss: torch.Tensor | None = None
    for step in range(1, recipe.updates(engine.steps) + 1):
        for index in range(recipe.accumulation):
            watcher.enter(f"step {step} forward")
            # The next batch is on its way before the last one is dropped.
            held = mark_batch(batch(*next(asked)), watcher)
            with engine.micro_batch(is_last=index == recipe.accumulation - 1):
                with autocast(recipe.precision):
                    outputs = _outputs(model, held)
                    loss = _loss(outputs, held, recipe)
                if is_function:
                    outputs = None
                if clears_late and index == 0:
                    _clear(parameters, recipe)
                scaled = _scaled(loss, recipe)
                watcher.mark_activations()
                watcher.enter(f"step {step} backward")
                scaled.backward()  # type: ignore[no-untyped-call]
                del scaled
                if is_function:
                    loss = None
            watcher.mark(engine.gradients(), "gradients")
        watcher.enter(f"step {step} update")
        _update(optimizer, recipe, watcher, engine)
        if not clears_late:
            _clear(parameters, recipe)


def mark_batch(batch: Batch, watcher: StepObserver) -> Batch:
    """It has come; returns it."""
    watcher.mark([each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)], "batch")
    return batch


def _outputs(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _loss(outputs: Any, batch: Batch, recipe: StepRecipe) -> torch.Tensor:
    """The loss of one micro-batch."""
    targets: Any = batch
    if isinstance(batch, tuple | list):
        targets = batch[1] if len(batch) == 2 else batch[1:]
    loss = recipe.loss(outputs, targets) if recipe.loss is not None else _own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError(
            f"the loss is {_said(loss)}; it must be a tensor of one element with a gradient. Give loss=, a function of the model's "
            "outputs and the batch's targets"
        )
    return loss


def _scaled(loss: torch.Tensor, recipe: StepRecipe) -> torch.Tensor:
    """As it goes into backward."""
    if recipe.precision == "fp16":
        loss = loss * torch.full((), 65536.0, device=loss.device)
    return loss / recipe.accumulation if recipe.accumulation > 1 else loss


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return getattr(outputs, "loss", None)


def _said(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return "missing" if loss is None else f"a {type(loss).__name__}"
    return f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")


def autocast(precision: str) -> AbstractContextManager[Any]:
    """The block of a forward in that format."""
    # Of a CPU also where the target is a card: fake tensors lie on a CPU (`kernels` adds the difference).
    return torch.autocast("cpu", dtype=_HALF[precision]) if precision in _HALF else nullcontext()


def _update(
    optimizer: torch.optim.Optimizer | None, recipe: StepRecipe, watcher: StepObserver, engine: StepEngine
) -> None:
    if recipe.precision == "fp16" and (gradients := engine.gradients()):
        found, inverse = torch.zeros(1), torch.ones(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        del gradients
    if recipe.max_norm is not None:
        engine.clip(recipe.max_norm)
    if optimizer is not None:
        optimizer.step()
        watcher.mark(state_of(optimizer), "optimizer state")


def _clear(parameters: list[nn.Parameter], recipe: StepRecipe) -> None:
    for parameter in parameters:
        if recipe.keeps_gradients and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of its state that take memory worth the name: counts of steps are left out."""
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return [part for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for part in plain(leaf)]


def as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Where nothing is said, torch's optimizers work on all parameters at once on a card, and one by one on a CPU."""
    if isinstance(optimizer, torch.optim.Adafactor):  # one by one on a card, too, to save memory
        return
    for group in optimizer.param_groups:
        is_free = "foreach" in group and group["foreach"] is None
        if is_free and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def mark_model(model: nn.Module, watcher: StepObserver) -> None:
    """The model's own tensors are there; asked for as `.to(device)` moves them: parts in order, then what is the whole's own."""
    for part in model.children():
        mark_model(part, watcher)
    for held, kind in ((model._parameters, "weights"), (model._buffers, "buffers")):
        # What is without memory, other ranks of a pipeline have.
        watcher.mark([each for each in held.values() if each is not None and not each.is_meta], kind)
    watcher.mark(scales_of(model), "weights")


def run(
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[..., Batch],
    watcher: StepObserver | None = None,
    on_cuda: bool = False,
    engine: StepEngine | None = None,
) -> None:
    """Run the updates of a model.

    Args:
        model: its parameters lie where it computes.
        recipe: how.
        batch: gives the next micro-batch, of a length where the recipe has lengths.
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
    batch: Callable[..., Batch],
    watcher: StepObserver,
    engine: StepEngine,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Run a loop over the micro-batches.

    Raises:
        ConfigError: it ended without a backward, or without the updates of its batches.
    """
    phases = LoopPhases(watcher, engine)

    def batches() -> Iterator[Batch]:
        for asked in recipe.asked(engine.steps):
            phases.enter("forward")
            yield mark_batch(batch(*asked), watcher)  # held by the loop alone

    if optimizer is not None:
        optimizer.register_step_pre_hook(lambda *_: phases.enter("update"))
        optimizer.register_step_post_hook(lambda stepped, *_: phases.updated(stepped))
    with phases, autocast(recipe.precision), engine.micro_batch(is_last=True):
        loop(model, batches(), optimizer)
    updates = recipe.updates(engine.steps)
    if not phases.has_backward or phases.num_updates < (0 if optimizer is None else updates):
        raise ConfigError(
            f"loop= was given {updates * recipe.accumulation} micro-batches and made {phases.num_updates} updates"
            f"{'' if phases.has_backward else ' and no backward'}; it must iterate over all of its batches, call backward on the "
            f"loss, and step the optimizer after every {recipe.accumulation}"
        )
