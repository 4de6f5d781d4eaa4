"""`headway.forecast`: what a training step will take on a card, and the largest batch that fits, from one that is not there."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from headway.config.engines import ActivationCheckpointing, EngineOptions, collect_options
from headway.config.values import check_count
from headway.errors import ConfigError
from headway.forecasting.answer import Forecast, of_trace
from headway.forecasting.device.devices import Device, budget_of, find
from headway.forecasting.forecaster import LongestSequence, StepForecaster
from headway.forecasting.tracing.step import Loop, Loss, StepRecipe
from headway.forecasting.tracing.tensors import MASK, POSITIONS
from headway.planning.dry_run.script import dry_run_script
from headway.planning.dry_run.trial import treats_blocks_alike
from headway.planning.layouts import FakeRank, placed
from headway.planning.optimizers import Optimizer, maker
from headway.planning.optimizers import caveats as of_optimizer
from headway.planning.sources import unmasked

Recompute = bool | ActivationCheckpointing | Callable[[nn.Module], object]


def forecast(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[..., Any],
    *,
    batch_size: int = 8,
    optimizer: Optimizer = "adamw",
    loss: Loss | None = None,
    device: str = "rtx-3090",
    budget: int | str | None = None,
    precision: str = "no",
    recompute: Recompute = False,
    accumulation: int = 1,
    max_norm: float | None = None,
    loop: str | Loop = "plain",
    lengths: Sequence[int] = (),
    expandable_segments: bool = False,
    largest: bool = True,
    longest: LongestSequence | None = None,
    strategy: str | None = None,
    ranks: int | None = None,
    kwargs_handlers: Sequence[Any] = (),
    machine_ranks: int = 8,
) -> Forecast:
    """Forecast the memory that a training step takes on a device that this machine need not have.

    Two of the model's own steps are traced on tensors without values, in seconds, and their allocations are answered by a model of
    CUDA's caching allocator. The batch that `batch_fn` gives is called as `model(**batch)` where it is a mapping, as
    `model(batch[0])` where it is a tuple or list of inputs and targets, and as `model(batch)` otherwise.

    Args:
        model_fn: makes the model, here without memory.
        batch_fn: makes a micro-batch of a given number of samples, as `batch_fn(batch_size)`; its values do not matter.
        batch_size: samples of the micro-batch that is forecast.
        optimizer: a name ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop", "adafactor", "adafactor_transformers",
            "adamw8bit", "adamw8bit_bnb", "muon", "none"), or a function that makes the optimizer from parameters.
        loss: from the model's outputs and the batch's targets; None: the model returns it, or an object that has it as `loss`.
        device: one of those listed in docs/forecast.md.
        budget: bytes, or text such as "24GiB", that the whole process may take; None: all memory of the device.
        precision: "no", "bf16" or "fp16", by autocast; a model in another dtype is what `model_fn` gives.
        recompute: activation checkpointing: True, what `checkpoint_activations` takes, or a function that is given the model.
        accumulation: micro-batches of one update.
        max_norm: gradients are clipped to this norm.
        loop: what holds memory between the calls. "plain": the names of a hand-written loop, `outputs` and `loss` among them, keep
            their values until they are assigned again, and gradients are cleared after the update. "zero_grad_before_backward": the
            same, but gradients are cleared between forward and backward. "loss_function": a function computes the loss, and the
            outputs go when it returns. Or the loop itself, as `loop(model, batches, optimizer)`; `loss` is then not used.
        lengths: of sequences that vary, a micro-batch each in this order, made by `batch_fn(batch_size, length)`: all updates that
            they make up are traced, so that what torch's allocator loses between blocks of unlike sizes is counted. A sample of some
            tens of a data set's is meant. Empty: all micro-batches are alike.
        expandable_segments: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        largest: also look for the largest batch within the budget.
        longest: also look for the longest sequence within the budget, at `batch_size`.
        strategy: the layout, as for the Accelerator: "ddp", "fsdp", "hsdp=8", "tp", "fsdp+tp=2"; None: one process. The forecast is
            for rank 0, which holds the most, and batch sizes are per rank.
        ranks: the number of ranks in the run; goes with `strategy`.
        kwargs_handlers: the Accelerator's: ShardingOptions, TensorParallelOptions, DistributedDataParallelKwargs,
            ActivationCheckpointing, AutocastKwargs(half_residual=True).
        machine_ranks: ranks on one machine, for "hsdp".

    Raises:
        ConfigError: an argument is wrong.
        LossError: there is no loss, or it has no gradient.
        PrepareError: the model cannot be sharded.
        StateError: with a strategy, in a process that has joined a process group.
        UnsupportedError: the step cannot be traced (the operation and the line are named), or the layout cannot be forecast.
    """
    check_count(batch_size=batch_size)
    target = find(device)
    recipe = StepRecipe(maker(optimizer), loss, precision, accumulation, max_norm, loop=loop, lengths=tuple(lengths))
    if lengths and longest is not None:
        raise ConfigError(
            "lengths and longest are both given: the longest sequence is searched for at one length; give one of them"
        )
    options, prepare = preparation(recompute, collect_options(list(kwargs_handlers)))
    place = _place(strategy, ranks, options, precision, machine_ranks, target)
    example = _first(batch_fn, (1, *next(recipe.asked())))
    step = StepForecaster(
        partial(made, model_fn, example), batch_fn, recipe, target, prepare, expandable_segments, place,
        can_repeat=treats_blocks_alike(options),
    )  # fmt: skip
    found = step.forecast(batch_size, budget_of(target, budget), largest, longest)
    caveats = (*place.caveats(), *found.caveats, *of_optimizer(optimizer), *_of_batch(example))
    return replace(found, caveats=caveats, strategy=strategy or "", num_ranks=place.layout.num_ranks)


def forecast_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    device: str = "rtx-3090",
    budget: int | str | None = None,
    expandable_segments: bool = False,
) -> Forecast:
    """Say what a user's own script takes: it is run up to its second update, on one process, on tensors without values.

    For a process that does nothing else: the script is run as `__main__`, with its own arguments.

    Args:
        script: a Python file whose loop uses an Accelerator.
        arguments: the script's own.
        device, budget, expandable_segments: as for `forecast`.

    Raises:
        ConfigError: there is no such script, or it makes no update.
        UnsupportedError: the step cannot be traced; the operation and the line are named.
    """
    began = time.perf_counter()
    target = find(device)
    traced, batch_size = dry_run_script(script, arguments, target)
    found = of_trace(traced, target, batch_size, budget_of(target, budget), expandable_segments)
    return replace(found, seconds=time.perf_counter() - began)


def made(model_fn: Callable[[], nn.Module], batch: Any) -> nn.Module:
    """The model as it is traced with such a batch; in one with positions transformers masks packed sequences from each other."""
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_fn returned {type(model).__name__}; it must return a torch.nn.Module")
    # A mask in the batch is looked into by transformers, which takes another way if nothing is masked.
    return unmasked(model) if hasattr(model, "set_attn_implementation") and not _holds(batch, POSITIONS) else model


def preparation(
    recompute: Recompute, options: EngineOptions
) -> tuple[EngineOptions, Callable[[nn.Module], object] | None]:
    """The options with what is to be recomputed; a function of the user's goes beside them."""
    if recompute is False:
        return options, None
    if not isinstance(recompute, ActivationCheckpointing | bool):
        return options, recompute
    if options.checkpointing is not None:
        raise ConfigError(
            "recompute and an ActivationCheckpointing in kwargs_handlers are both given; give one of them"
        )
    plan = recompute if isinstance(recompute, ActivationCheckpointing) else ActivationCheckpointing()
    return replace(options, checkpointing=plan), None


def _place(
    strategy: str | None, ranks: int | None, options: EngineOptions, precision: str, machine_ranks: int, target: Device
) -> FakeRank:
    if (strategy is None) != (ranks is None):
        raise ConfigError(
            f"strategy={strategy!r} and ranks={ranks!r}: give both, as in strategy='fsdp', ranks=8; for one process neither"
        )
    computes_on = "cuda" if target.is_cuda else "cpu"
    return placed(strategy or "ddp", 1 if ranks is None else ranks, options, precision, machine_ranks, computes_on)


def _first(batch_fn: Callable[..., Any], asked: tuple[int, ...]) -> Any:
    try:
        signature = inspect.signature(batch_fn)
    except ValueError:  # written in C, it need not tell its arguments
        return batch_fn(*asked)
    try:
        signature.bind(*asked)
    except TypeError as error:
        wanted = "(batch_size, length), because lengths= is given" if len(asked) > 1 else "(batch_size)"
        raise ConfigError(f"batch_fn{signature} cannot be called as batch_fn{wanted}: {error}") from error
    return batch_fn(*asked)


def _holds(batch: Any, name: str) -> bool:
    return isinstance(batch, dict) and name in batch


def _of_batch(batch: Any) -> tuple[str, ...]:
    if _holds(batch, MASK):
        return (
            "the batch has an attention_mask, whose values are not known here: transformers then builds a mask for every layer, "
            "which a run leaves out if no token is padding",
        )
    if _holds(batch, POSITIONS):
        return (
            "the batch has position_ids, which are taken to be those of packed sequences: transformers then builds a mask, which a "
            "run leaves out if each row is one sequence; leave position_ids out to forecast that",
        )
    return ()
