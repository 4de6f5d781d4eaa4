"""Memory forecast for a training step of the user's own model, made inside the script: `accelerator.forecast`.

A copy of the model without values is traced, with the Accelerator's precision, accumulation and activation
checkpointing. The model, its optimizer and all RNG states remain unchanged.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headway.common import env
from headway.core.precision.mixed import halve_embeddings
from headway.core.runtime.collectives.tree import list_tensors
from headway.core.runtime.process import ProcessRuntime
from headway.core.training.forecast_types import Forecast, ForecastRequest, Forward, MakeOptimizer, TrainingSetup
from headway.core.training.prepared.dispatched import list_dispatch_places
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.weights.compiled import unwrap_compiled
from headway.errors import ConfigError, UnsupportedError
from headway.forecasting.device.devices import Device, find_device, resolve_budget
from headway.forecasting.device.local_device import describe_local_device, measure_budget
from headway.forecasting.forecaster import StepForecaster
from headway.forecasting.tracing.attention_masks import drop_masks, skip_causal_mask
from headway.forecasting.tracing.batch_resizer import BatchResizer
from headway.forecasting.tracing.buckets import make_replica
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.engine import StepEngine
from headway.forecasting.tracing.model_copy import copy_model, copy_optimizer, ensure_untouched
from headway.forecasting.tracing.recipe import PRECISIONS, StepRecipe

_REPLICATED = ("single", "ddp")
"""Strategies with the full model on each rank. `Accelerator.forecast` supports no others."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that configure torch's allocator. The first exists only in newer versions of torch."""
_EXPANDABLE = "expandable_segments:true"
_PADDING_CAVEAT = (
    "the batch's attention_mask masks something; if nothing is masked, transformers' models drop it and take less "
    "memory"
)


def forecast_step(request: ForecastRequest, setup: TrainingSetup) -> Forecast:
    """Return the memory forecast for a call of `Accelerator.forecast`, which documents the errors.

    Args:
        request: Arguments of the `Accelerator.forecast` call.
        setup: Settings of the Accelerator, such as precision and accumulation.
    """
    _check_request(request, setup)
    target, limit = _resolve_target(request, setup.run.runtime)
    resizer = BatchResizer(request.batch)
    recipe, caveats = _make_recipe(request, setup)
    is_expandable = target.is_cuda and any(
        _EXPANDABLE in (env.get(name) or "").lower() for name in _ALLOCATOR_VARIABLES
    )
    forecaster = StepForecaster(
        partial(_copy_prepared_model, request, setup, resizer),
        partial(_make_batch, request, resizer),
        recipe,
        target,
        is_expandable=is_expandable,
        distribute_model=partial(_distribute_replica, setup) if setup.run.strategy.name == "ddp" else None,
    )
    with ensure_untouched(request.model), torch.inference_mode(False), torch.enable_grad():
        forecast = forecaster.forecast(resizer.num_rows, limit, request.largest)
    if request.batch_fn is None:
        caveats += resizer.caveats
    if resizer.is_padded:
        caveats += (_PADDING_CAVEAT,)
    return replace(forecast, caveats=(*forecast.caveats, *caveats))


def _check_request(request: ForecastRequest, setup: TrainingSetup) -> None:
    """Raise an error if `accelerator.forecast` cannot forecast the request.

    Args:
        request: Arguments of the call.
        setup: Settings and run of the Accelerator.

    Raises:
        ConfigError: If the model is not a Module, or if both `loss` and `forward` are given.
        UnsupportedError: If the strategy or the precision cannot be forecast. Also if the model is compiled, or is
            distributed over several devices.
    """
    model, strategy, precision = request.model, setup.run.strategy.name, setup.run.precision.name
    if not isinstance(model, nn.Module):
        raise ConfigError(f"forecast() got a {type(model).__name__} as its model; give the torch.nn.Module")
    if request.loss is not None and request.forward is not None:
        raise ConfigError("forward= makes the loss itself, so loss= would not be called; give one of them")
    if strategy not in _REPLICATED:
        raise UnsupportedError(
            f"accelerator.forecast does not know what the {strategy} strategy leaves on a process; before a run, "
            "headway.forecast(strategy=..., ranks=...) and `headway estimate --strategy` do"
        )
    if precision not in PRECISIONS:
        raise UnsupportedError(
            f"mixed_precision={precision!r} cannot be forecast yet; allowed: {', '.join(PRECISIONS)}"
        )
    refuse_compiled(model)
    if setup.run.compilation.compiles:
        raise UnsupportedError(
            "prepare() compiles the model (dynamo_backend), and the memory of compiled graphs is known only after they are "
            "compiled. Forecast with an Accelerator that does not compile; a compiled step usually needs less memory"
        )
    places = list_dispatch_places(model, setup.run.runtime.device)
    if places:
        raise UnsupportedError(
            f"{type(model).__name__} is spread over {', '.join(places)}, but a forecast is for one device; load it on one"
        )


def _resolve_target(request: ForecastRequest, runtime: ProcessRuntime) -> tuple[Device, int | None]:
    """Return the device to forecast for, and the bytes that the process may use on it.

    The bytes are None if no limit is known.
    """
    if request.device is not None:
        target = find_device(request.device)
        return target, resolve_budget(target, request.budget)
    target = describe_local_device(runtime.hardware, runtime.device)
    if request.budget is not None:
        return target, resolve_budget(target, request.budget)
    return target, measure_budget(runtime.hardware, runtime.device, target, _sum_held_bytes(request))


def _sum_held_bytes(request: ForecastRequest) -> int:
    """Return the bytes of the training's tensors that are already allocated.

    These are the tensors of the model, its gradients and the optimizer's state. A forecast includes them, so their
    memory counts as usable.
    """
    allocated: list[torch.Tensor] = [*request.model.parameters(), *request.model.buffers()]
    allocated += [parameter.grad for parameter in request.model.parameters() if parameter.grad is not None]
    if isinstance(request.optimizer, torch.optim.Optimizer):
        allocated += list_tensors([dict(state) for state in request.optimizer.state.values()])
    storages = [each.untyped_storage() for each in allocated if not is_lazy(each) and not each.is_meta]
    num_bytes = {storage._cdata: storage.nbytes() for storage in storages}  # tied tensors count once
    return sum(num_bytes.values())


def _make_recipe(request: ForecastRequest, setup: TrainingSetup) -> tuple[StepRecipe, tuple[str, ...]]:
    """Return the configuration of the steps to trace, and the caveats of the forecast that follow from it.

    Raises:
        ConfigError: If the request's optimizer is neither an optimizer, nor a function, nor None.
    """
    optimizer = request.optimizer
    make_optimizer: MakeOptimizer | None = None
    caveats: tuple[str, ...] = ()
    if isinstance(optimizer, torch.optim.Optimizer):
        unwrapped = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        make_optimizer = partial(_copy_optimizer, unwrapped, request.model)
    elif callable(optimizer):
        make_optimizer = optimizer
    elif optimizer is None:
        caveats = ("no optimizer was given: neither its state nor the update is in the numbers",)
    else:
        raise ConfigError(
            f"optimizer={optimizer!r}; give the model's optimizer, or a function that makes one from parameters"
        )
    recipe = StepRecipe(
        make_optimizer,
        loss=None if request.forward is not None else request.loss,
        precision=setup.run.precision.name if setup.run.options.autocast.enabled else "no",
        # In the second micro-batch, gradients exist during forward. Further micro-batches need no more memory.
        accumulation=min(setup.run.windows.num_steps, 2),
        max_norm=request.max_norm,
        loop=request.loop,
        averages=_list_averages(request, setup),
    )
    return recipe, caveats


def _list_averages(request: ForecastRequest, setup: TrainingSetup) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the model's moving averages on the run's device, with None for the default dtype.

    Averages are an extension in a higher layer, so they are recognized by their attributes.
    """
    model = request.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    model = unwrap_compiled(model)
    averages = [each for each in setup.run.custom if getattr(each, "follows_model", False) and each.model is model]
    device_type = setup.run.runtime.device.type
    return tuple(
        average.dtype
        for average in averages
        if all(tensor.device.type == device_type for tensor in average.list_tensors())
    )


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer for the copies of a model's trainable parameters.

    Args:
        optimizer: Optimizer of the model.
        model: Model with the original parameters.
        copies: Copies of the trainable parameters, in the order of the model.
    """
    return copy_optimizer(optimizer, [each for each in model.parameters() if each.requires_grad], copies)


def _copy_prepared_model(request: ForecastRequest, setup: TrainingSetup, resizer: BatchResizer) -> nn.Module:
    """Return a copy of the model without values, changed in the same way as `prepare()` would change the model.

    Args:
        request: Arguments of the `Accelerator.forecast` call.
        setup: Settings of the Accelerator.
        resizer: Function that returns a batch with any number of rows.
    """
    model = copy_model(request.model)
    setup.recompute(request.model, model)
    if setup.run.options.autocast.half_residual:
        halve_embeddings(model)  # changes nothing if prepare() has already done so
    if not resizer.is_padded and not resizer.is_packed and hasattr(model, "set_attn_implementation"):
        model = skip_causal_mask(model)
        if resizer.is_padded is False:  # None: the batch has no mask, so there is none to drop
            drop_masks(model)
    return model if request.forward is None else _ModelWithForward(model, request.forward)


class _ModelWithForward(nn.Module):
    """Module that calls a model through the user's forward function, which also computes the loss."""

    def __init__(self, model: nn.Module, function: Forward) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss that the user's function computes for a batch."""
        return self._function(self.model, batch)


@contextmanager
def _distribute_replica(setup: TrainingSetup, model: nn.Module) -> Iterator[StepEngine]:
    """Return a context with the engine of a model that DDP replicates, under the run's options."""
    yield make_replica(model, setup.run.options.ddp)


def _make_batch(request: ForecastRequest, resizer: BatchResizer, size: int) -> Any:
    """Return a batch of `size` samples without values, in the form in which the traced model is called.

    Args:
        request: Arguments of `accelerator.forecast`.
        resizer: Function that resizes the batch of the request.
        size: Number of samples.
    """
    batch = resizer(size) if request.batch_fn is None else request.batch_fn(size)
    # The model is called with the first element of a pair. `_ModelWithForward` takes the whole batch as one argument.
    return batch if request.forward is None else (batch, None)
