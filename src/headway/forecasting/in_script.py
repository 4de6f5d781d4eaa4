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
from headway.forecasting.device.present import describe_present_device, measure_budget
from headway.forecasting.forecaster import StepForecaster
from headway.forecasting.tracing.attention_masks import drop_masks, skip_causal_mask
from headway.forecasting.tracing.buckets import make_replica
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.model_copy import BatchResizer, copy_model, copy_optimizer, ensure_untouched
from headway.forecasting.tracing.step import PRECISIONS, StepEngine, StepRecipe

_REPLICATED = ("single", "ddp")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:true"
_PADDED = "the batch's attention_mask masks something; if nothing is masked, transformers' models drop it and take less memory"


class _ModelWithForward(nn.Module):
    """Module that calls a model through the user's forward function, which also computes the loss."""

    def __init__(self, model: nn.Module, function: Forward) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: Any) -> torch.Tensor:
        return self._function(self.model, batch)


def forecast_step(question: ForecastRequest, setting: TrainingSetup) -> Forecast:
    """Return the memory forecast for a call of `Accelerator.forecast`, which documents the errors.

    Args:
        question: Arguments of the `Accelerator.forecast` call.
        setting: Settings of the Accelerator, such as precision and accumulation.
    """
    _check_request(question, setting)
    target, limit = _resolve_target(question, setting.run.runtime)
    rows = BatchResizer(question.batch)
    recipe, caveats = _make_recipe(question, setting)
    is_expandable = target.is_cuda and any(_EXPANDABLE in (env.get(name) or "").lower() for name in _ALLOCATOR)
    step = StepForecaster(
        partial(_copy_prepared_model, question, setting, rows),
        partial(_make_batch, question, rows),
        recipe,
        target,
        is_expandable=is_expandable,
        spread=partial(_spread_replica, setting) if setting.run.strategy.name == "ddp" else None,
    )
    with ensure_untouched(question.model), torch.inference_mode(False), torch.enable_grad():
        found = step.forecast(rows.num_rows, limit, question.largest)
    if question.batch_fn is None:
        caveats += rows.caveats
    if rows.is_padded:
        caveats += (_PADDED,)
    return replace(found, caveats=(*found.caveats, *caveats))


def _check_request(question: ForecastRequest, setting: TrainingSetup) -> None:
    model, strategy, precision = question.model, setting.run.strategy.name, setting.run.precision.name
    if not isinstance(model, nn.Module):
        raise ConfigError(f"forecast() got a {type(model).__name__} as its model; give the torch.nn.Module")
    if question.loss is not None and question.forward is not None:
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
    if setting.run.compilation.compiles:
        raise UnsupportedError(
            "prepare() compiles the model (dynamo_backend), and the memory of compiled graphs is known only after they are "
            "compiled. Forecast with an Accelerator that does not compile; a compiled step usually needs less memory"
        )
    places = list_dispatch_places(model, setting.run.runtime.device)
    if places:
        raise UnsupportedError(
            f"{type(model).__name__} is spread over {', '.join(places)}, but a forecast is for one device; load it on one"
        )


def _resolve_target(question: ForecastRequest, runtime: ProcessRuntime) -> tuple[Device, int | None]:
    """Return the device to forecast for, and the bytes that the process may use on it.

    The bytes are None if no limit is known.
    """
    if question.device is not None:
        target = find_device(question.device)
        return target, resolve_budget(target, question.budget)
    target = describe_present_device(runtime.hardware, runtime.device)
    if question.budget is not None:
        return target, resolve_budget(target, question.budget)
    return target, measure_budget(runtime.hardware, runtime.device, target, _sum_held_bytes(question))


def _sum_held_bytes(question: ForecastRequest) -> int:
    """Return the bytes of the training's tensors that are already allocated.

    These are the tensors of the model, its gradients and the optimizer's state. A forecast includes them, so their
    memory counts as usable.
    """
    allocated: list[torch.Tensor] = [*question.model.parameters(), *question.model.buffers()]
    allocated += [parameter.grad for parameter in question.model.parameters() if parameter.grad is not None]
    if isinstance(question.optimizer, torch.optim.Optimizer):
        allocated += list_tensors([dict(state) for state in question.optimizer.state.values()])
    plain = [each for each in allocated if not is_lazy(each) and not each.is_meta]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in plain}.values())


def _make_recipe(question: ForecastRequest, setting: TrainingSetup) -> tuple[StepRecipe, tuple[str, ...]]:
    given = question.optimizer
    made: MakeOptimizer | None = None
    caveats: tuple[str, ...] = ()
    if isinstance(given, torch.optim.Optimizer):
        own = given.optimizer if isinstance(given, PreparedOptimizer) else given
        made = partial(_copy_optimizer, own, question.model)
    elif callable(given):
        made = given
    elif given is None:
        caveats = ("no optimizer was given: neither its state nor the update is in the numbers",)
    else:
        raise ConfigError(
            f"optimizer={given!r}; give the model's optimizer, or a function that makes one from parameters"
        )
    recipe = StepRecipe(
        made,
        None if question.forward is not None else question.loss,
        setting.run.precision.name if setting.run.options.autocast.enabled else "no",
        # In the second micro-batch, gradients exist during forward. Further micro-batches need no more memory.
        min(setting.run.windows.num_steps, 2),
        question.max_norm,
        loop=question.loop,
        averages=_list_averages(question, setting),
    )
    return recipe, caveats


def _list_averages(question: ForecastRequest, setting: TrainingSetup) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the model's moving averages on the run's device, with None for the default dtype.

    Averages are an extension in a higher layer, so they are recognized by their attributes.
    """
    given = question.model
    model = unwrap_compiled(given.module if isinstance(given, nn.parallel.DistributedDataParallel) else given)
    found = [each for each in setting.run.custom if getattr(each, "follows_model", False) and each.model is model]
    place = setting.run.runtime.device.type
    return tuple(each.dtype for each in found if all(tensor.device.type == place for tensor in each.list_tensors()))


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    return copy_optimizer(optimizer, [each for each in model.parameters() if each.requires_grad], copies)


def _copy_prepared_model(question: ForecastRequest, setting: TrainingSetup, rows: BatchResizer) -> nn.Module:
    """Return a copy of the model without values, changed in the same way as `prepare()` would change the model.

    Args:
        question: Arguments of the `Accelerator.forecast` call.
        setting: Settings of the Accelerator.
        rows: Function that returns a batch with any number of rows.
    """
    made = copy_model(question.model)
    setting.recompute(question.model, made)
    if setting.run.options.autocast.half_residual:
        halve_embeddings(made)  # changes nothing if prepare() has already done so
    if not rows.is_padded and not rows.is_packed and hasattr(made, "set_attn_implementation"):
        made = skip_causal_mask(made)
        if rows.is_padded is False:
            drop_masks(made)
    return made if question.forward is None else _ModelWithForward(made, question.forward)


@contextmanager
def _spread_replica(setting: TrainingSetup, model: nn.Module) -> Iterator[StepEngine]:
    yield make_replica(model, setting.run.options.ddp)


def _make_batch(question: ForecastRequest, rows: BatchResizer, size: int) -> Any:
    made = rows(size) if question.batch_fn is None else question.batch_fn(size)
    # `_ModelWithForward` takes the batch as one argument, whatever its type.
    return made if question.forward is None else (made, None)
