"""What a step of a user's own model takes, forecast inside the script: `accelerator.forecast`.

A copy of the model without values is traced, with the Accelerator's precision, accumulation and activation checkpointing. The model,
its optimizer and every generator stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headway.common import env
from headway.config.engines import EngineOptions
from headway.errors import ConfigError, UnsupportedError
from headway.forecasting.answer import Forecast
from headway.forecasting.device.devices import Device, budget_of, find
from headway.forecasting.device.present import memory_left, present_device
from headway.forecasting.forecaster import StepForecaster
from headway.forecasting.tracing.buckets import replica
from headway.forecasting.tracing.compiled import refuse_compiled
from headway.forecasting.tracing.model_copy import BatchResizer, twin_of, twin_of_optimizer, untouched
from headway.forecasting.tracing.step import PRECISIONS, Loop, Loss, MakeOptimizer, StepEngine, StepRecipe
from headway.forecasting.tracing.tensors import drop_masks, unmasked
from headway.offload import spread_over
from headway.precision.mixed import halve_embeddings
from headway.runtime.collectives.tree import Tree, tensors
from headway.runtime.process import ProcessRuntime
from headway.training.hooks import RunParts
from headway.training.prepared.optimizer import PreparedOptimizer

Forward = Callable[[Any, Any], torch.Tensor]
_REPLICATED = ("single", "ddp")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:true"
_PADDED = "the batch's attention_mask masks something; if nothing is masked, transformers' models drop it and take less memory"


@dataclass(frozen=True)
class TrainingSetup:
    """How an Accelerator trains.

    Attributes:
        parts: of the run.
        options: of the engines underneath.
        compiles: prepare() compiles models.
        recompute: from the model and its copy: lets the copy recompute what the model does, or will once it is prepared.
    """

    parts: RunParts
    options: EngineOptions
    compiles: bool
    recompute: Callable[[nn.Module, nn.Module], None]


@dataclass(frozen=True)
class ForecastRequest:
    """What is to be forecast; see `Accelerator.forecast`."""

    model: nn.Module
    batch: Tree
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None
    loss: Loss | None = None
    forward: Forward | None = None
    budget: int | str | None = None
    largest: bool = True
    batch_fn: Callable[[int], Tree] | None = None
    max_norm: float | None = None
    device: str | None = None
    loop: str | Loop = "plain"


class _Called(nn.Module):
    """A model that is called by a function of the user's, which also makes the loss."""

    def __init__(self, model: nn.Module, function: Forward) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, batch: Any) -> torch.Tensor:
        return self._function(self.model, batch)


def forecast(question: ForecastRequest, setting: TrainingSetup) -> Forecast:
    """Answer it; `Accelerator.forecast` says what is raised."""
    _check(question, setting)
    target, limit = _target(question, setting.parts.runtime)
    rows = BatchResizer(question.batch)
    recipe, caveats = _recipe(question, setting)
    is_expandable = target.is_cuda and any(_EXPANDABLE in (env.get(name) or "").lower() for name in _ALLOCATOR)
    step = StepForecaster(
        partial(_twin, question, setting, rows),
        partial(_batch, question, rows),
        recipe,
        target,
        is_expandable=is_expandable,
        spread=partial(_replica, setting) if setting.parts.strategy.name == "ddp" else None,
    )
    with untouched(question.model), torch.inference_mode(False), torch.enable_grad():
        found = step.forecast(rows.num_rows, limit, question.largest)
    if question.batch_fn is None:
        caveats += rows.caveats
    if rows.is_padded:
        caveats += (_PADDED,)
    return replace(found, caveats=(*found.caveats, *caveats))


def _check(question: ForecastRequest, setting: TrainingSetup) -> None:
    model, strategy, precision = question.model, setting.parts.strategy.name, setting.parts.precision.name
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
    if setting.compiles:
        raise UnsupportedError(
            "prepare() compiles the model (dynamo_backend), and what compiled graphs ask for is not known before they are compiled. "
            "Forecast with an Accelerator that does not compile; a compiled step mostly takes less"
        )
    places = spread_over(model, setting.parts.runtime.device)
    if places:
        raise UnsupportedError(
            f"{type(model).__name__} is spread over {', '.join(places)}, but a forecast is for one device; load it on one"
        )


def _target(question: ForecastRequest, runtime: ProcessRuntime) -> tuple[Device, int | None]:
    """The device, and the bytes that the process may take on it."""
    if question.device is not None:
        target = find(question.device)
        return target, budget_of(target, question.budget)
    target = present_device(runtime.hardware, runtime.device)
    if question.budget is not None:
        return target, budget_of(target, question.budget)
    return target, memory_left(runtime.hardware, runtime.device, target, _held(question))


def _held(question: ForecastRequest) -> int:
    """Bytes of what is there already and is counted in the forecast, too."""
    there: list[torch.Tensor] = [*question.model.parameters(), *question.model.buffers()]
    there += [parameter.grad for parameter in question.model.parameters() if parameter.grad is not None]
    if isinstance(question.optimizer, torch.optim.Optimizer):
        there += tensors([dict(state) for state in question.optimizer.state.values()])
    plain = [each for each in there if not is_lazy(each) and not each.is_meta]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in plain}.values())


def _recipe(question: ForecastRequest, setting: TrainingSetup) -> tuple[StepRecipe, tuple[str, ...]]:
    given = question.optimizer
    made: MakeOptimizer | None = None
    caveats: tuple[str, ...] = ()
    if isinstance(given, torch.optim.Optimizer):
        own = given.optimizer if isinstance(given, PreparedOptimizer) else given
        made = partial(_optimizer, own, question.model)
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
        setting.parts.precision.name if setting.options.autocast.enabled else "no",
        # From the second micro-batch on gradients are there in forward; later ones take no more.
        min(setting.parts.windows.num_steps, 2),
        question.max_norm,
        loop=question.loop,
    )
    return recipe, caveats


def _optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    return twin_of_optimizer(optimizer, [each for each in model.parameters() if each.requires_grad], copies)


def _twin(question: ForecastRequest, setting: TrainingSetup, rows: BatchResizer) -> nn.Module:
    """A copy of the model as prepare() makes it."""
    made = twin_of(question.model)
    setting.recompute(question.model, made)
    if setting.options.autocast.half_residual:
        halve_embeddings(made)  # where prepare() has done so, once more, which changes nothing
    if not rows.is_padded and not rows.is_packed and hasattr(made, "set_attn_implementation"):
        made = unmasked(made)
        if rows.is_padded is False:
            drop_masks(made)
    return made if question.forward is None else _Called(made, question.forward)


@contextmanager
def _replica(setting: TrainingSetup, model: nn.Module) -> Iterator[StepEngine]:
    yield replica(model, setting.options.ddp)


def _batch(question: ForecastRequest, rows: BatchResizer, size: int) -> Any:
    made = rows(size) if question.batch_fn is None else question.batch_fn(size)
    # As one argument, whatever it is.
    return made if question.forward is None else (made, None)
