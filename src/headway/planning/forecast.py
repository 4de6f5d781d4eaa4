"""Forecast the memory of a training step, and the largest batch that fits, for any device (`headway.forecast`)."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.engines import EngineOptions, collect_options
from headway.core.config.values import check_count
from headway.core.training.forecast_types import Forecast, Loop, Loss
from headway.errors import ConfigError
from headway.forecasting.device.devices import Device, find_device, resolve_budget
from headway.forecasting.forecast_builder import build_forecast
from headway.forecasting.forecaster import LongestSequence, StepForecaster
from headway.forecasting.tracing.attention_masks import MASK, POSITIONS
from headway.forecasting.tracing.recipe import StepRecipe
from headway.planning.dry_run.repeated import can_repeat_blocks
from headway.planning.dry_run.script import dry_run_script
from headway.planning.dry_run.updates import find_fullest_owner
from headway.planning.fake_rank import FakeRank, make_fake_rank
from headway.planning.make_model import has_key, make_model
from headway.planning.optimizers import Optimizer, list_optimizer_caveats, resolve_optimizer

Recompute = bool | ActivationCheckpointing | Callable[[nn.Module], object]
"""Setting of activation checkpointing: a boolean, its options, or a function that is called with the model."""


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
    averages: int = 0,
) -> Forecast:
    """Forecast the memory that a training step needs on a device, which need not be in this machine.

    Call it in one process, without an Accelerator. `Accelerator.forecast` uses the settings of a run instead. Nothing
    is computed or allocated on a device.

    Two training steps are traced on tensors without values, which takes seconds. Their allocations are replayed by a
    model of CUDA's caching allocator. The model is called as `model(**batch)` if the batch is a mapping, as
    `model(batch[0])` if it is a tuple or list of inputs and targets, and as `model(batch)` otherwise.

    Args:
        model_fn: Function that makes the model. It is called in a context in which parameters take no memory.
        batch_fn: Function that makes a micro-batch of a given number of samples, as `batch_fn(batch_size)`. The values
            of the micro-batch do not matter.
        batch_size: Samples per micro-batch. Default: 8.
        optimizer: Name of an optimizer ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop", "adafactor",
            "adafactor_transformers", "adamw8bit", "adamw4bit", "adamwfp8", "adamw8bit_bnb", "muon", "none"), or a
            function that makes an optimizer from parameters. Default: "adamw".
        loss: Loss function of the model's outputs and the batch's targets. None (the default): the model returns the
            loss, or an object with a `loss` attribute.
        device: Name of a device, as listed in docs/forecast.md. "this": the CUDA device of this process. Default:
            "rtx-3090".
        budget: Bytes that the whole process may use, or text such as "24GiB". None (the default): all memory of the
            device.
        precision: Autocast precision: "no" (the default), "bf16" or "fp16". If the parameters are not in float32, let
            `model_fn` return a model that already has their dtype.
        recompute: Activation checkpointing: True, an `ActivationCheckpointing`, or a function that is called with the
            model to enable it. False (the default): none.
        accumulation: Micro-batches per update. Default: 1.
        max_norm: Maximum norm for gradient clipping. None (the default): no clipping.
        loop: Loop that decides how long tensors live. With "plain" (the default), the variables of a hand-written loop,
            such as `outputs` and `loss`, live until they are assigned again, and gradients are cleared after the
            update. "zero_grad_before_backward" is like "plain", but gradients are cleared between forward and backward.
            With "loss_function", a function computes the loss, and the outputs are freed when it returns. A function
            replaces the loop: it is called as `loop(model, batches, optimizer)`, and `loss` is not used.
        lengths: Sequence length of each micro-batch, if lengths vary. `batch_fn(batch_size, length)` makes the batches,
            and all of their updates are traced. So the forecast includes the memory that torch's allocator loses
            between blocks of unequal sizes. A few dozen lengths sampled from a data set are enough. Empty if all
            micro-batches have the same size.
        expandable_segments: Whether to assume `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. Default: False.
        largest: Whether to search for the largest batch within the budget. Without a budget and a known memory size, as
            on a CPU, no search runs. Default: True.
        longest: Options of the search for the longest sequence within the budget at `batch_size`. None (the default):
            no search.
        strategy: Layout, as the Accelerator's argument `strategy`: "ddp", "fsdp", "hsdp=8", "tp" or "fsdp+tp=2". The
            forecast is for the rank that needs the most memory. Batch sizes are per rank. None (the default): one
            process.
        ranks: World size. Required with `strategy`, and None (the default) without it.
        kwargs_handlers: Options that the Accelerator accepts as `kwargs_handlers`: ShardingOptions,
            TensorParallelOptions, DistributedDataParallelKwargs, ActivationCheckpointing,
            AutocastKwargs(half_residual=True).
        machine_ranks: Ranks per machine, for "hsdp". Default: 8.
        averages: Number of `ExponentialMovingAverage`s that are kept on the device. Each has the dtype of its
            parameter, but at least float32. Default: 0.

    Returns:
        The forecast. `print` shows it as text. Its attributes are in bytes, such as `total` and `split`; `fits` and
        `largest_batch` answer whether the step fits.

    Raises:
        ConfigError: If an argument is wrong, or only one of `strategy` and `ranks` is given. Also if a function `loop`
            does not call backward or makes too few updates.
        DeviceUnavailable: If `device` is "this" and there is no CUDA device.
        LossError: If there is no loss, or the loss has no gradient.
        OptionalDependencyMissing: If the package of a named optimizer is not installed.
        PrepareError: If the model cannot be sharded.
        StateError: If `strategy` shards or splits the model and this process has joined a process group.
        UnsupportedError: If the step cannot be traced or the layout cannot be forecast. If an operation of the step
            cannot be traced, the message names the operation and the user's line.

    Example::

        def make_batch(n):
            return torch.zeros(n, 64), torch.zeros(n, dtype=torch.long)

        result = forecast(build_model, make_batch, loss=F.cross_entropy, device="h100", precision="bf16")
        print(result.largest_batch)
    """
    check_count(batch_size=batch_size)
    if type(averages) is not int or averages < 0:
        raise ConfigError(f"averages={averages!r}; give the number of averages, 0 or more")
    target = find_device(device)
    make_optimizer = resolve_optimizer(optimizer)
    recipe = StepRecipe(
        make_optimizer,
        loss,
        precision,
        accumulation,
        max_norm,
        loop=loop,
        lengths=tuple(lengths),
        averages=(None,) * averages,
    )
    if longest is not None and not isinstance(longest, LongestSequence):
        raise ConfigError(
            f"longest={longest!r}; give headway.LongestSequence(batch_fn), whose batch_fn takes a batch size and a length"
        )
    if lengths and longest is not None:
        raise ConfigError(
            "lengths and longest are both given: the longest sequence is searched for at one length; give one of them"
        )
    options, prepare = make_preparation(recompute, collect_options(list(kwargs_handlers)))
    fake_rank = _make_rank(strategy, ranks, options, precision, machine_ranks, target)
    first_batch_args = next(recipe.iterate_batch_args())
    example = _make_first_batch(batch_fn, (1, *first_batch_args))
    make = partial(make_model, model_fn, example)
    owner = find_fullest_owner(make, optimizer, make_optimizer, fake_rank.layout, options, machine_ranks, prepare)
    fake_rank = replace(fake_rank, rank=owner or 0)
    forecaster = StepForecaster(
        model_fn=make,
        batch_fn=batch_fn,
        recipe=recipe,
        device=target,
        prepare=prepare,
        is_expandable=expandable_segments,
        distribute_model=fake_rank,
        can_repeat=can_repeat_blocks(options) and owner is None,  # another block can change all owners
    )
    traced_forecast = forecaster.forecast(batch_size, resolve_budget(target, budget), largest, longest)
    caveats = (
        *fake_rank.list_caveats(),
        *traced_forecast.caveats,
        *list_optimizer_caveats(optimizer),
        *_list_batch_caveats(example),
    )
    return replace(
        traced_forecast,
        caveats=caveats,
        strategy=strategy or "",
        num_ranks=fake_rank.layout.num_ranks,
        rank=fake_rank.rank,
    )


def forecast_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    device: str = "rtx-3090",
    budget: int | str | None = None,
    expandable_segments: bool = False,
    is_module: bool = False,
) -> Forecast:
    """Forecast the memory of a user's script by running it on tensors without values up to its second update.

    The script runs as `__main__` in this process, so call this function in a process that does nothing else.

    Args:
        script: Path of a Python file, or name of a module, whose loop uses an Accelerator.
        arguments: Arguments of the script.
        device, budget, expandable_segments: As in `forecast`, with the same defaults.
        is_module: Whether `script` is the name of a module, as for `python -m`. Default: False.

    Raises:
        ConfigError: If the script does not exist, makes no update, or ends with an error code before its second update.
            Also if `device` or `budget` is wrong.
        DeviceUnavailable: If `device` is "this" and there is no CUDA device.
        UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
    """
    began = time.perf_counter()
    target = find_device(device)
    trace, batch_size = dry_run_script(script, arguments, target, is_module)
    traced_forecast = build_forecast(trace, target, batch_size, resolve_budget(target, budget), expandable_segments)
    return replace(traced_forecast, seconds=time.perf_counter() - began)


def make_preparation(
    recompute: Recompute, options: EngineOptions
) -> tuple[EngineOptions, Callable[[nn.Module], object] | None]:
    """Return engine options and a function that changes the model, for a setting of activation checkpointing.

    If `recompute` is a function, it is returned with the unchanged options. Otherwise the function is None.

    Args:
        recompute: Setting of activation checkpointing.
        options: Engine options to start from.

    Raises:
        ConfigError: If `recompute` is none of these settings, or `recompute` and `options` both request activation
            checkpointing.
    """
    if recompute is False:
        return options, None
    if not isinstance(recompute, ActivationCheckpointing | bool):
        if not callable(recompute):
            raise ConfigError(
                f"recompute={recompute!r}; give True, False, an ActivationCheckpointing, or a function that is called with the model"
            )
        return options, recompute
    if options.checkpointing is not None:
        raise ConfigError(
            "recompute and an ActivationCheckpointing in kwargs_handlers are both given; give one of them"
        )
    plan = recompute if isinstance(recompute, ActivationCheckpointing) else ActivationCheckpointing()
    return replace(options, checkpointing=plan), None


def _make_rank(
    strategy: str | None, ranks: int | None, options: EngineOptions, precision: str, machine_ranks: int, target: Device
) -> FakeRank:
    """Return the rank whose memory is forecast.

    Args:
        strategy: Name of the layout, or None for one process.
        ranks: World size, or None for one process.
        options: Options of the engines.
        precision: "no", "bf16" or "fp16".
        machine_ranks: Ranks per machine.
        target: Device to forecast for.

    Raises:
        ConfigError: If only one of `strategy` and `ranks` is None, or if the layout does not divide the ranks.
    """
    if (strategy is None) != (ranks is None):
        raise ConfigError(
            f"strategy={strategy!r} and ranks={ranks!r}: give both, as in strategy='fsdp', ranks=8; for one process neither"
        )
    device_type = "cuda" if target.is_cuda else "cpu"
    return make_fake_rank(
        strategy or "ddp", 1 if ranks is None else ranks, options, precision, machine_ranks, device_type
    )


def _make_first_batch(batch_fn: Callable[..., Any], args: tuple[int, ...]) -> Any:
    """Return the batch for the given arguments: (batch size,) or (batch size, sequence length).

    Raises:
        ConfigError: If the function's signature does not accept these arguments.
    """
    try:
        signature = inspect.signature(batch_fn)
    except ValueError:  # some functions written in C have no signature
        return batch_fn(*args)
    try:
        signature.bind(*args)
    except TypeError as error:
        call = "(batch_size, length), because lengths= is given" if len(args) > 1 else "(batch_size)"
        raise ConfigError(f"batch_fn{signature} cannot be called as batch_fn{call}: {error}") from error
    return batch_fn(*args)


def _list_batch_caveats(batch: Any) -> tuple[str, ...]:
    """Return the assumptions about the values of a batch, as sentences. A trace does not know these values."""
    if has_key(batch, MASK):
        return (
            "the batch has an attention_mask, whose values are not known here: transformers then builds a mask for every layer, "
            "which a run leaves out if no token is padding",
        )
    if has_key(batch, POSITIONS):
        return (
            "the batch has position_ids, which are taken to be those of packed sequences: transformers then builds a mask, which a "
            "run leaves out if each row is one sequence; leave position_ids out to forecast that",
        )
    return ()
