"""Find the cheapest configuration that trains with a given global batch on one device (`headway.cheapest`)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from headway.common.text import format_bytes, format_columns
from headway.core.config.engines import EngineOptions
from headway.core.config.other_library_names import explain_precision
from headway.core.config.values import check_count
from headway.core.training.forecast_types import Loop, Loss
from headway.errors import ConfigError, UnsupportedError
from headway.forecasting.budget_search import PROBE
from headway.forecasting.device.devices import compute_allocator_limit, find_device, resolve_budget
from headway.forecasting.forecaster import StepForecaster
from headway.forecasting.tracing.attention_masks import set_attention
from headway.forecasting.tracing.recipe import NUM_UPDATES, PRECISIONS, StepRecipe
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.work import StepWork
from headway.planning.dry_run.repeated import can_repeat_blocks
from headway.planning.fake_rank import make_fake_rank
from headway.planning.forecast import Recompute, make_preparation
from headway.planning.make_model import make_model
from headway.planning.optimizers import Optimizer, resolve_optimizer

_FIT_ORDER = {True: 0, None: 1, False: 2}
"""Position of a row in the sorted table, by the value of `Configuration.fits`: fitting rows come first."""


@dataclass(frozen=True)
class Configuration:
    """Configuration of a training run, with its memory and relative cost. Sizes are in bytes.

    Attributes:
        micro_batch: Samples per micro-batch: the largest number that fits and divides the global batch.
        accumulation: Micro-batches per update.
        recompute: Whether activations are recomputed in backward.
        precision: "no", "bf16" or "fp16".
        optimizer: Name of the optimizer.
        attention: Attention implementation that is passed to `set_attn_implementation`, or None for the model's
            default.
        least: Lower bound of the memory in use on the device.
        total: Likely memory in use on the device.
        most: Upper bound of the memory in use on the device.
        fits: True if `most` fits into the budget, False if not even `least` fits, and None if the answer is uncertain
            or the configuration was not traced.
        cost: Cost of an update relative to the cheapest configuration that fits, or to the cheapest of all if none
            fits. None if the configuration was not traced. The cost is no forecast of time. docs/forecast_reference.md
            explains what it counts.
        work: Floating point operations and memory traffic of one update, or None if the configuration was not traced.
        problem: Reason why there is no forecast. Empty if there is one.
    """

    micro_batch: int
    accumulation: int
    recompute: bool
    precision: str
    optimizer: str
    attention: str | None = None
    least: int = 0
    total: int = 0
    most: int = 0
    fits: bool | None = None
    cost: float | None = None
    work: StepWork | None = None
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary that can be written as JSON. Objects become nested dictionaries."""
        return asdict(self)


def cheapest(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    *,
    global_batch_size: int,
    device: str = "rtx-3090",
    budget: int | str | None = None,
    optimizers: Sequence[Optimizer] = ("adamw",),
    precisions: Sequence[str] = ("no", "bf16"),
    recompute: Sequence[Recompute] = (False, True),
    attention: Sequence[str | None] = (None,),
    micro_batches: Sequence[int] | None = None,
    loss: Loss | None = None,
    max_norm: float | None = None,
    loop: str | Loop = "plain",
    expandable_segments: bool = False,
) -> list[Configuration]:
    """Rank the configurations that train with a given global batch on a device.

    The device need not be in this machine. For each combination of attention, optimizer, precision and recomputation,
    the search finds the largest micro-batch that fits and divides the global batch. Combinations that fit come first,
    then uncertain ones, then those that do not fit, and last those that cannot be traced. Within each group, rows are
    sorted by relative cost, then by memory. Call it in one process, without an Accelerator.

    Args:
        model_fn: Function that makes the model. It is called in a context in which parameters take no memory.
        batch_fn: Function that makes a micro-batch of a given number of samples, as `batch_fn(batch_size)`. Values do
            not matter.
        global_batch_size: Samples per update on the device.
        device: Name of a device, as listed in docs/forecast.md. "this": the CUDA device of this process. Default:
            "rtx-3090".
        budget: Bytes that the whole process may use, or text such as "24GiB". None (the default): all memory of the
            device.
        optimizers: Names of optimizers, as for `headway.forecast`, or functions that make an optimizer from parameters.
            Default: "adamw" alone.
        precisions: Precisions to try, out of "no", "bf16" and "fp16". Default: "no" and "bf16".
        recompute: Settings of activation checkpointing to try: False, True, an `ActivationCheckpointing`, or a function
            that is called with the model to enable it. Default: False and True.
        attention: Names to pass to a transformers model's `set_attn_implementation`. None (the default) keeps the
            model's own.
        micro_batches: Allowed micro-batch sizes. None (the default): all that divide the global batch.
        loss: Loss function of the model's outputs and the batch's targets. None (the default): the model returns the
            loss, or an object with a `loss` attribute.
        max_norm: Maximum norm for gradient clipping. None (the default): no clipping.
        loop: Loop that decides how long tensors live, as for `headway.forecast`. Default: "plain".
        expandable_segments: Whether to assume `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. Default: False.

    Returns:
        One `Configuration` for each combination, best first. If no micro-batch fits, it shows the smallest one.

    Raises:
        ConfigError: If an argument is wrong, or no allowed micro-batch divides the global batch. Also if the table
            lacks the device's memory size and `budget` is None.
        DeviceUnavailable: If `device` is "this" and there is no CUDA device.
        LossError: If there is no loss, or the loss has no gradient.
        OptionalDependencyMissing: If the package of a named optimizer is not installed.
        UnsupportedError: If no combination can be traced. If only some combinations cannot be traced, their rows
            contain the reason in `problem`.

    Example::

        best = cheapest(build_model, make_batch, global_batch_size=32, loss=F.cross_entropy)[0]
        print(best.micro_batch, best.accumulation, best.precision, best.recompute)
    """
    target = find_device(device)
    limit = resolve_budget(target, budget)
    if limit is None:
        raise ConfigError(f"device={device!r} has no memory size in the table; give budget, such as budget='8GiB'")
    _check_options(precisions, optimizers=optimizers, recompute=recompute, attention=attention)
    allowed = _list_divisors(global_batch_size, micro_batches)
    rows: list[Configuration] = []
    refusals: list[UnsupportedError] = []
    for kernel, optimizer, precision, checkpointing in product(attention, optimizers, precisions, recompute):
        options, prepare = make_preparation(checkpointing, EngineOptions())
        make = model_fn if kernel is None else partial(_make_with_attention, model_fn, kernel)
        forecaster = StepForecaster(
            model_fn=partial(make_model, make, batch_fn(1)),
            batch_fn=batch_fn,
            recipe=StepRecipe(
                resolve_optimizer(optimizer), loss, precision=precision, accumulation=1, max_norm=max_norm, loop=loop
            ),
            device=target,
            prepare=prepare,
            is_expandable=expandable_segments,
            distribute_model=make_fake_rank(
                "ddp",
                num_ranks=1,
                options=options,
                precision=precision,
                machine_ranks=1,
                device_type="cuda" if target.is_cuda else "cpu",
            ),
            counts_work=True,
            can_repeat=can_repeat_blocks(options),
        )
        blank = Configuration(
            micro_batch=allowed[-1],
            accumulation=global_batch_size // allowed[-1],
            recompute=checkpointing is not False,
            precision=precision,
            optimizer=_name_optimizer(optimizer),
            attention=kernel,
        )
        try:
            rows.append(_fill_row(blank, forecaster, limit, allowed))
        except UnsupportedError as error:
            refusals.append(error)
            rows.append(replace(blank, problem=str(error)))
        except ConfigError as error:  # a model without blocks to recompute can still be trained without recomputation
            if checkpointing is False or False not in recompute:
                raise
            rows.append(replace(blank, problem=str(error)))
    if refusals and all(row.problem for row in rows):
        raise refusals[0]
    return _rank_rows(rows)


def _fill_row(blank: Configuration, forecaster: StepForecaster, limit: int, allowed: list[int]) -> Configuration:
    """Return a copy of `blank` with the memory and cost of the largest allowed micro-batch that fits.

    If none fits, the row describes the smallest allowed micro-batch.

    Args:
        blank: Row of the table, without sizes and costs.
        forecaster: Forecaster of an update with one micro-batch.
        limit: Budget in bytes.
        allowed: Allowed micro-batch sizes, in descending order.
    """
    global_batch = blank.micro_batch * blank.accumulation
    allows_global_batch = allowed[0] == global_batch
    if len(allowed) == 1 and allows_global_batch:
        return _make_row(blank, forecaster, global_batch, limit)
    capacity = compute_allocator_limit(forecaster.device, limit)
    # Gradients exist while the next micro-batch runs, so two micro-batches are traced. More need no additional memory.
    accumulating_forecaster = replace(forecaster, recipe=replace(forecaster.recipe, accumulation=2))
    # The curve extrapolates the bytes of large sizes from a few traces. Smaller sizes are traced one by one.
    large_sizes = [size for size in allowed if size >= PROBE]
    bytes_by_size = dict(accumulating_forecaster.compute_curve(large_sizes)) if large_sizes else {}
    if allows_global_batch:
        # The curve is for accumulation. Without it, no gradients exist during forward, which saves at most their bytes.
        least_bytes = 0
        if global_batch in bytes_by_size:
            least_bytes = bytes_by_size[global_batch] - _count_weight_bytes(accumulating_forecaster)
        if least_bytes <= capacity:
            row = _make_row(blank, forecaster, global_batch, limit)
            if row.fits:
                return row
    smaller_sizes = [size for size in allowed if size < global_batch]
    upper_bound = smaller_sizes[0]
    if not bytes_by_size:  # no curve: all sizes are small, or the step changes with the batch size
        upper_bound = accumulating_forecaster.find_largest_batch(capacity, smaller_sizes[0])
    for size in smaller_sizes:
        if size > upper_bound or bytes_by_size.get(size, 0) > capacity:
            continue
        row = _make_row(blank, accumulating_forecaster, size, limit)
        if row.fits:
            return row
    return _make_row(blank, accumulating_forecaster, smaller_sizes[-1], limit)


def _count_weight_bytes(forecaster: StepForecaster) -> int:
    """Return the bytes of all of the model's weights. Their gradients take equally many bytes."""
    events = forecaster.trace(PROBE).events
    return sum(event.num_bytes for event in events if event.kind == "weights" and event.num_bytes > 0)


def _make_row(blank: Configuration, forecaster: StepForecaster, size: int, limit: int) -> Configuration:
    """Return a copy of `blank` with the memory and cost of a micro-batch of `size` samples, whether or not it fits.

    `cost` is in seconds, and is not relative to other rows yet.

    Args:
        blank: Row of the table, without sizes and costs.
        forecaster: Forecaster of an update.
        size: Samples per micro-batch, which divides the global batch.
        limit: Budget in bytes.
    """
    forecast = forecaster.forecast(size, limit)
    accumulation = blank.micro_batch * blank.accumulation // size
    work = _compute_update_work(forecaster.trace(size), forecaster.recipe.accumulation, accumulation)
    return replace(
        blank,
        micro_batch=size,
        accumulation=accumulation,
        least=forecast.least,
        total=forecast.total,
        most=forecast.most,
        fits=forecast.fits,
        cost=work.seconds,
        work=work,
    )


def _compute_update_work(trace: Trace, traced_accumulation: int, accumulation: int) -> StepWork:
    """Return the work (floating-point operations and memory traffic) of an update, extrapolated from a traced step.

    Args:
        trace: Trace of the step.
        traced_accumulation: Number of micro-batches in the traced step.
        accumulation: Number of micro-batches in the update.
    """
    forward, backward, update = (
        trace.work.get(f"step {NUM_UPDATES} {phase}", StepWork()) for phase in ("forward", "backward", "update")
    )
    return (forward + backward) * (accumulation / traced_accumulation) + update


def _rank_rows(rows: list[Configuration]) -> list[Configuration]:
    """Return the rows in the order of the table, with costs relative to the cheapest row that fits.

    If no row fits, costs are relative to the cheapest of all rows.
    """
    costs = [row.cost for row in rows if row.cost is not None]
    fitting_costs = [row.cost for row in rows if row.cost is not None and row.fits]
    unit = min(fitting_costs or costs, default=1.0)
    relative = [row if row.cost is None else replace(row, cost=row.cost / unit) for row in rows]
    return sorted(relative, key=lambda row: (bool(row.problem), _FIT_ORDER[row.fits], row.cost or 0.0, row.most))


def _make_with_attention(model_fn: Callable[[], nn.Module], kernel: str) -> nn.Module:
    """Return a model with the given attention implementation.

    Args:
        model_fn: Function that makes the model.
        kernel: Name of the attention implementation.

    Raises:
        ConfigError: If the model has no method `set_attn_implementation`.
    """
    model = model_fn()
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"attention={kernel!r}: {type(model).__name__} has no set_attn_implementation; choose the kernel in model_fn"
        )
    set_attention(model, kernel)
    return model


def _list_divisors(global_batch_size: int, micro_batches: Sequence[int] | None) -> list[int]:
    """Return the micro-batch sizes that divide the global batch, in descending order.

    Args:
        global_batch_size: Samples of the global batch.
        micro_batches: Allowed micro-batch sizes, or None for all.

    Raises:
        ConfigError: If `micro_batches` is no sequence, a size is not a positive integer, or no allowed size divides the
            global batch.
    """
    check_count(global_batch_size=global_batch_size)
    if micro_batches is not None and (isinstance(micro_batches, str) or not isinstance(micro_batches, Iterable)):
        raise ConfigError(f"micro_batches={micro_batches!r}; give a sequence of sizes, such as (1, 2, 4)")
    sizes = range(1, global_batch_size + 1) if micro_batches is None else micro_batches
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong:
        raise ConfigError(f"micro_batches has {wrong[0]!r}; each is a number of 1 or more")
    divisors = sorted({size for size in sizes if global_batch_size % size == 0}, reverse=True)
    if not divisors:
        raise ConfigError(
            f"none of micro_batches={list(sizes)} divides global_batch_size={global_batch_size}; give sizes that do, or "
            "leave micro_batches out to try all of them"
        )
    return divisors


def _check_options(precisions: Sequence[str], **options: Sequence[Any]) -> None:
    """Raise ConfigError if an option is not a non-empty sequence, or a precision is unknown.

    Args:
        precisions: Precisions to try.
        options: Values to try of all other options, by argument of `cheapest`.
    """
    for name, values in {"precisions": precisions, **options}.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{name}={values!r}; give a tuple of one or more")
    for precision in precisions:
        if precision not in PRECISIONS:
            hint = explain_precision(precision, PRECISIONS)
            raise ConfigError(f"precisions has {precision!r}; allowed: {', '.join(PRECISIONS)}{hint}")


def _name_optimizer(optimizer: Optimizer) -> str:
    """Return an optimizer's name for the table: its own, or that of the function or class that makes it."""
    return optimizer if isinstance(optimizer, str) else str(getattr(optimizer, "__name__", type(optimizer).__name__))


def format_table(rows: Sequence[Configuration]) -> str:
    """Return the configurations as a table for the terminal, in the given order."""
    head = ["", "cost", "micro-batch", "x", "precision", "optimizer", "recompute", "attention", "memory", "range"]
    shown = {True: "fits", None: "may fit", False: "does not fit"}
    lines = [head]
    for row in rows:
        cost, memory, span = "-", "-", ""
        if row.cost is not None:
            cost, memory = f"{row.cost:.2f}", format_bytes(row.total)
            span = f"{format_bytes(row.least)} to {format_bytes(row.most)}"
        lines.append(
            [
                "not traced" if row.problem else shown[row.fits], cost, str(row.micro_batch), str(row.accumulation),
                row.precision, row.optimizer, "yes" if row.recompute else "no", row.attention or "-", memory, span,
            ]
        )  # fmt: skip
    if not any(row.attention for row in rows):
        lines = [[*line[:7], *line[8:]] for line in lines]
    return "\n".join(format_columns(lines))
