"""Run the training steps that a forecast traces: forward, loss, backward, gradient clipping and update.

A step follows one of the loops in `LOOPS`, or the user's own loop function. Each part of a step is reported to an
observer as a phase. Steps can also run on real tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.core.config.foreign_words import explain_precision
from headway.core.config.values import check_count
from headway.core.training.forecast_types import Loop, Loss, MakeOptimizer
from headway.errors import ConfigError, LossError
from headway.forecasting._torch import foreach_mul_, foreach_norm, tree_leaves, unscale_gradients_
from headway.forecasting.tracing.four_bit import iterate_scales
from headway.forecasting.tracing.reads import answer_reads
from headway.forecasting.tracing.tensors import iterate_plain_tensors

Batch = Any

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("no", *_HALF)
"""Precisions in which steps can be traced."""
NUM_UPDATES = 2
"""Number of updates to trace.

The optimizer creates its state in the first update, so only the second one is like all later ones.
"""


LOOPS = ("plain", "zero_grad_before_backward", "loss_function")
"""Names of the loops that `run_steps` can run. They differ in how long outputs, loss and gradients stay in memory."""


def check_precision(precision: str) -> None:
    """Raise ConfigError if steps cannot be traced in this precision."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision={precision!r}; allowed: {', '.join(PRECISIONS)}{explain_precision(precision, PRECISIONS)}"
        )


@dataclass(frozen=True)
class StepRecipe:
    """Configuration of the training steps to run.

    Attributes:
        optimizer: Function that makes the optimizer from the trainable parameters, or None for no update.
        loss: Loss function of outputs and targets, or None if the model returns its loss.
        precision: "no", "bf16" or "fp16", applied by autocast. "fp16" also scales the loss.
        accumulation: Micro-batches per update.
        max_norm: Maximum norm for gradient clipping, or None for no clipping.
        keeps_gradients: Whether gradients keep their memory because they are zeroed in place, as with
            `zero_grad(set_to_none=False)`.
        loop: Loop that determines how long tensors stay in memory, one of `LOOPS` or a function that is called as the
            loop. With "plain", variables such as the outputs and the loss live until they are assigned again, and
            gradients are freed after the update. "zero_grad_before_backward" is like "plain", but frees gradients
            between forward and backward. With "loss_function", a function computes the loss, and the outputs are freed
            when it returns.
        lengths: Sequence length of each micro-batch, in order. Empty if all micro-batches have the same size.
        averages: For each moving average of the trainable parameters, its dtype. None for the dtype of the parameters,
            but at least float32.

    Raises:
        ConfigError: If the precision or the loop is unknown, or `accumulation` is less than 1. Also if `max_norm` is
            given for a user's own loop, or `lengths` does not consist of at least two whole updates.
    """

    optimizer: MakeOptimizer | None
    loss: Loss | None = None
    precision: str = "no"
    accumulation: int = 1
    max_norm: float | None = None
    keeps_gradients: bool = False
    loop: str | Loop = "plain"
    lengths: tuple[int, ...] = ()
    averages: tuple[torch.dtype | None, ...] = ()

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
        if self.lengths and (
            len(self.lengths) % self.accumulation or self.count_updates() < NUM_UPDATES or min(self.lengths) < 1
        ):
            raise ConfigError(
                f"lengths: {len(self.lengths)} of them, the smallest {min(self.lengths)}; give those of {NUM_UPDATES} or more whole "
                f"updates of {self.accumulation} micro-batch(es) each, all of 1 or more"
            )

    def count_updates(self, default: int = NUM_UPDATES) -> int:
        """Return the number of updates to run.

        If the recipe has `lengths`, the number follows from them, because there is one length per micro-batch.

        Args:
            default: Number of updates for a recipe without `lengths`. Default: `NUM_UPDATES`.
        """
        return len(self.lengths) // self.accumulation if self.lengths else default

    def list_requests(self, default: int = NUM_UPDATES) -> Iterator[tuple[int, ...]]:
        """Yield a tuple for each micro-batch: the arguments of `batch_fn` after the number of samples.

        If the recipe has `lengths`, the tuple contains the micro-batch's sequence length. Otherwise it is empty.

        Args:
            default: Number of updates for a recipe without `lengths`. Default: `NUM_UPDATES`.
        """
        yield from ((length,) for length in self.lengths) if self.lengths else [()] * (default * self.accumulation)


class StepObserver:
    """Interface of an observer that is notified of the phases and tensors of a running step.

    The methods of this base class do nothing.
    """

    def enter_phase(self, phase: str) -> None:
        """Handle the start of a phase, such as "step 1 forward". Operations until the next call belong to the phase."""

    def mark_tensors(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Handle a report that the given tensors are of one kind of memory, such as "gradients"."""

    def mark_activations(self) -> None:
        """Handle the end of forward. All memory that forward has allocated and not freed counts as activations."""


class StepEngine:
    """Interface of an engine that distributes a step over ranks. This base class runs the whole model in one process.

    Args:
        model: Model whose gradients the engine manages.
    """

    num_updates = NUM_UPDATES
    """Number of updates to trace. From the last of them on, memory requests are the same in each update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def make_modes(self) -> Iterable[AbstractContextManager[Any]]:
        """Return the context managers, such as dispatch modes, in which the step runs. The base class needs none."""
        return ()

    def list_own_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, apart from those of the model, that the engine allocates before the first step.

        An example is DDP's buckets. The base class has no such tensors.
        """
        return []

    def run_micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context manager in which the forward and backward passes of a micro-batch run.

        Gradients are reduced over ranks only in the last micro-batch of an accumulation window.

        Args:
            is_last: Whether the micro-batch is the last of its accumulation window.
        """
        return nullcontext()

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check a new optimizer, and decide how it updates parameters. The base class does nothing."""

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Make an update with an optimizer.

        Args:
            optimizer: Optimizer to step.
            closure: Closure of the step, or None. Default: None.
        """
        with answer_reads(optimizer):
            optimizer.step(*([] if closure is None else [closure]))

    def list_gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients, including those that are reduced only at the end of the accumulation window."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients down so that their norm over all parameters is at most `max_norm`.

        This is equivalent to torch's `clip_grad_norm_` with `foreach=True`, which torch refuses for tensors on a CPU.
        """
        gradients = self.list_gradients()
        if not gradients:
            return
        norms = foreach_norm(gradients, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))


def run_steps(
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[..., Batch],
    observer: StepObserver,
    engine: StepEngine,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Run the updates of a recipe with one of the loops in `LOOPS`, which `StepRecipe` describes.

    Args:
        model: Model to train.
        recipe: Configuration of the steps.
        batch: Function that returns the next micro-batch. It takes a sequence length if the recipe has lengths.
        observer: Observer of the steps.
        engine: Engine that distributes the model over ranks.
        parameters: Trainable parameters.
        optimizer: Optimizer of the parameters, or None for no update.

    Raises:
        LossError: If the loss is not a scalar with a gradient.
    """
    batch_args = recipe.list_requests(engine.num_updates)
    clears_before_backward = recipe.loop == "zero_grad_before_backward"
    has_loss_function = recipe.loop == "loss_function"
    current_batch: Batch = None
    outputs: Any = None
    loss: torch.Tensor | None = None
    for step in range(1, recipe.count_updates(engine.num_updates) + 1):
        for index in range(recipe.accumulation):
            observer.enter_phase(f"step {step} forward")
            # As in a real loop, the previous batch lives until this assignment, so both batches are briefly in memory.
            current_batch = mark_batch(batch(*next(batch_args)), observer)
            with engine.run_micro_batch(is_last=index == recipe.accumulation - 1):
                with make_autocast(recipe.precision):
                    outputs = _call_model(model, current_batch)
                    loss = _compute_loss(outputs, current_batch, recipe)
                if has_loss_function:
                    outputs = None
                if clears_before_backward and index == 0:
                    _clear_gradients(parameters, recipe)
                scaled = _scale_loss(loss, recipe)
                observer.mark_activations()
                observer.enter_phase(f"step {step} backward")
                scaled.backward()  # type: ignore[no-untyped-call]
                del scaled
                if has_loss_function:
                    loss = None
            observer.mark_tensors(engine.list_gradients(), "gradients")
        observer.enter_phase(f"step {step} update")
        _update_parameters(optimizer, recipe, observer, engine)
        if not clears_before_backward:
            _clear_gradients(parameters, recipe)


def mark_batch(batch: Batch, observer: StepObserver) -> Batch:
    """Report the tensors of a new micro-batch to the observer, and return the micro-batch."""
    observer.mark_tensors([each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)], "batch")
    return batch


def _call_model(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _compute_loss(outputs: Any, batch: Batch, recipe: StepRecipe) -> torch.Tensor:
    """Return the loss of one micro-batch. Raise LossError unless it is a scalar with a gradient."""
    targets: Any = batch
    if isinstance(batch, tuple | list):
        targets = batch[1] if len(batch) == 2 else batch[1:]
    loss = recipe.loss(outputs, targets) if recipe.loss is not None else _get_own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LossError(
            f"the loss is {_describe_loss(loss)}; it must be a tensor of one element with a gradient. Give loss=, a function of the "
            "model's outputs and the batch's targets"
        )
    return loss


def _scale_loss(loss: torch.Tensor, recipe: StepRecipe) -> torch.Tensor:
    """Return the loss to call `backward` on.

    The loss is scaled for fp16, and divided by the number of accumulated micro-batches.
    """
    if recipe.precision == "fp16":
        loss = loss * torch.full((), 65536.0, device=loss.device)
    return loss / recipe.accumulation if recipe.accumulation > 1 else loss


def _get_own_loss(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return getattr(outputs, "loss", None)


def _describe_loss(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return "missing" if loss is None else f"a {type(loss).__name__}"
    return f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")


def make_autocast(precision: str) -> AbstractContextManager[Any]:
    """Return the autocast context for the forward pass in a precision: "no", "bf16" or "fp16"."""
    # Autocast is that of the CPU even if the target is a GPU, because fake tensors are on the CPU. `substitute_kernels`
    # corrects the differences.
    return torch.autocast("cpu", dtype=_HALF[precision]) if precision in _HALF else nullcontext()


def _update_parameters(
    optimizer: torch.optim.Optimizer | None, recipe: StepRecipe, observer: StepObserver, engine: StepEngine
) -> None:
    """Unscale the gradients for fp16, clip them, and step the optimizer, as far as the recipe requests it."""
    if recipe.precision == "fp16" and (gradients := engine.list_gradients()):
        found_inf, inverse_scale = torch.zeros(1), torch.ones(1)
        unscale_gradients_(gradients, found_inf, inverse_scale)
        del gradients  # so that this list does not keep gradients alive during the update
    if recipe.max_norm is not None:
        engine.clip_gradients(recipe.max_norm)
    if optimizer is not None:
        engine.step_optimizer(optimizer)
        observer.mark_tensors(list_state(optimizer), "optimizer state")


def _clear_gradients(parameters: list[nn.Parameter], recipe: StepRecipe) -> None:
    for parameter in parameters:
        if recipe.keeps_gradients and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def list_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state, except scalars such as step counts, whose memory is negligible."""
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return [
        part
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        for part in iterate_plain_tensors(leaf)
    ]


def choose_cuda_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer use `foreach` kernels, as it does by default on a GPU.

    By default, torch's optimizers update all parameters at once on a GPU, but one at a time on a CPU. Groups in which
    the user has set `foreach`, `fused` or `differentiable` are not changed. Do nothing for Adafactor, which updates one
    parameter at a time on both.
    """
    if isinstance(optimizer, torch.optim.Adafactor):  # updates one parameter at a time on a GPU, too, to save memory
        return
    for group in optimizer.param_groups:
        has_default = "foreach" in group and group["foreach"] is None
        if has_default and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def mark_model(model: nn.Module, observer: StepObserver) -> None:
    """Report the model's tensors to the observer, in the order in which `.to(device)` allocates them.

    The tensors of submodules precede those of the module itself.
    """
    for part in model.children():
        mark_model(part, observer)
    for held, kind in ((model._parameters, "weights"), (model._buffers, "buffers")):
        # Tensors that are still on the meta device belong to other pipeline stages.
        observer.mark_tensors([each for each in held.values() if each is not None and not each.is_meta], kind)
    observer.mark_tensors(iterate_scales(model), "weights")


def _make_average(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    """Return memory for the average of this rank's shard of a parameter.

    Args:
        parameter: Parameter, possibly sharded.
        dtype: Dtype of the average. None for the dtype of the parameter, but at least float32.
    """
    shard = next(iterate_plain_tensors(parameter))
    return torch.empty_like(shard, dtype=dtype or torch.promote_types(shard.dtype, torch.float32))


def run_recipe(
    model: nn.Module,
    recipe: StepRecipe,
    batch: Callable[..., Batch],
    observer: StepObserver | None = None,
    on_cuda: bool = False,
    engine: StepEngine | None = None,
) -> None:
    """Run the updates of a recipe on a model.

    Args:
        model: Model on the device that computes.
        recipe: Configuration of the steps.
        batch: Function that returns the next micro-batch. It takes a sequence length if the recipe has lengths.
        observer: Observer of the steps, or None. Default: None.
        on_cuda: Whether the optimizer chooses its kernels as for parameters on a GPU. Default: False.
        engine: Engine that distributes the model over ranks, or None for one process. Default: None.

    Raises:
        LossError: If the loss is not a scalar with a gradient.
        ConfigError: If a user's own loop ends without calling backward, or makes too few updates.
    """
    observer, engine = observer or StepObserver(), engine or StepEngine(model)
    observer.enter_phase("set-up")
    mark_model(model, observer)
    observer.mark_tensors(engine.list_own_tensors(), "buckets")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = recipe.optimizer(parameters) if recipe.optimizer is not None else None
    if optimizer is not None:
        engine.adopt_optimizer(optimizer)
        if on_cuda:
            choose_cuda_kernels(optimizer)
    averages = [_make_average(parameter, dtype) for dtype in recipe.averages for parameter in parameters]
    observer.mark_tensors(averages, "averages")
    if callable(recipe.loop):
        run_loop(recipe.loop, model, recipe, batch, observer, engine, optimizer)
    else:
        run_steps(model, recipe, batch, observer, engine, parameters, optimizer)
    observer.enter_phase("end")


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
    original, is_engine_stepping = optimizer.step, False

    def step_through_engine(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal is_engine_stepping
        if is_engine_stepping:
            return original(*([] if closure is None else [closure]))
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
        for args in recipe.list_requests(engine.num_updates):
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
