"""Run the training steps that a forecast traces: forward, loss, backward, gradient clipping and update.

A step follows one of the loops in `LOOPS`, or the user's own loop function. Each part of a step is reported to an
observer as a phase. Steps can also run on real tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from headway.errors import LossError
from headway.forecasting._torch import unscale_gradients_
from headway.forecasting.tracing.engine import StepEngine, StepObserver
from headway.forecasting.tracing.recipe import StepRecipe, make_autocast
from headway.forecasting.tracing.reported_tensors import Batch, list_state, mark_batch, mark_model
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.forecasting.tracing.user_loop import run_loop


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
        _run_steps(model, recipe, batch, observer, engine, parameters, optimizer)
    observer.enter_phase("end")


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


def _make_average(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
    """Return memory for the average of this rank's shard of a parameter.

    Args:
        parameter: Parameter, possibly sharded.
        dtype: Dtype of the average. None for the dtype of the parameter, but at least float32.
    """
    shard = next(iterate_plain_tensors(parameter))
    return torch.empty_like(shard, dtype=dtype or torch.promote_types(shard.dtype, torch.float32))


def _run_steps(
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
    batch_args = recipe.iterate_batch_args(engine.num_updates)
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


def _call_model(model: nn.Module, batch: Batch) -> Any:
    """Call a model with a batch: a mapping as keyword arguments, of a tuple or list only the first element."""
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
    scaled_loss = loss
    if recipe.precision == "fp16":
        scaled_loss = scaled_loss * torch.full((), 65536.0, device=loss.device)
    if recipe.accumulation > 1:
        scaled_loss = scaled_loss / recipe.accumulation
    return scaled_loss


def _get_own_loss(outputs: Any) -> Any:
    """Return the loss that a model computed itself, or None if it returned no loss.

    The loss is the output itself if that is a tensor. Otherwise it is the output's key or attribute `loss`.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return getattr(outputs, "loss", None)


def _describe_loss(loss: Any) -> str:
    """Return a phrase about a loss that cannot be used, for an error message."""
    if not isinstance(loss, torch.Tensor):
        return "missing" if loss is None else f"a {type(loss).__name__}"
    return f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")


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
    """Set the gradients to zero if the recipe keeps them, otherwise to None."""
    for parameter in parameters:
        if recipe.keeps_gradients and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None
