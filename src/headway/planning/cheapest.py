"""`headway.cheapest`: of all ways to train with one global batch, those that fit on a card, the cheapest first."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from headway.common.text import columns, format_bytes
from headway.config.engines import EngineOptions
from headway.config.values import check_count
from headway.errors import ConfigError, UnsupportedError
from headway.forecasting.device.devices import budget_of, find, room
from headway.forecasting.forecaster import PROBE, StepForecaster
from headway.forecasting.tracing.step import PRECISIONS, STEPS, Loop, Loss, StepRecipe
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.work import StepWork
from headway.planning.dry_run.trial import treats_blocks_alike
from headway.planning.forecast import Recompute, made, preparation
from headway.planning.layouts import placed
from headway.planning.optimizers import Optimizer, maker

_FITTING = {True: 0, None: 1, False: 2}


@dataclass(frozen=True)
class Configuration:
    """One way to train. Sizes are bytes.

    Attributes:
        micro_batch: samples that the model sees at once: the most that fit, of those that divide the global batch.
        accumulation: micro-batches of one update.
        recompute: activations are computed again in backward.
        precision: "no", "bf16" or "fp16".
        optimizer: its name.
        attention: the attention kernel; None: the model's own.
        least: in use on the device at least.
        total: likely in use.
        most: in use at most.
        fits: True: even `most` stays within the budget; False: not even `least` does; None: it is too close to tell.
        cost: of one update, relative to the cheapest row that fits (if none does, to the cheapest of all); None: not traced.
            docs/forecast_reference.md says what it counts; it is not a forecast of time.
        work: what the operations of one update have to do; None: not traced.
        problem: why it cannot be forecast; "" if it can.
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
        """For JSON."""
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
    """Rank the ways to train with a global batch on one device that this machine need not have.

    For each combination of attention, optimizer, precision and recomputation, the search finds the largest micro-batch that fits
    and divides the global batch. Rows that fit come first; then rows are sorted by relative cost, then by memory.

    Args:
        model_fn, batch_fn, loss, device, budget, max_norm, loop, expandable_segments: as for `headway.forecast`.
        global_batch_size: samples per update.
        optimizers: names, or functions that make the optimizer from parameters.
        precisions: of "no", "bf16" and "fp16".
        recompute: the settings of activation checkpointing to try; each as for `headway.forecast`.
        attention: names for a transformers model's `set_attn_implementation`; None: the model's own.
        micro_batches: the sizes that are allowed; None: all that divide the global batch.

    Returns:
        One row for each combination. If nothing fits, the rows are those of the smallest micro-batch, and say so.

    Raises:
        ConfigError: an argument is wrong, or no allowed micro-batch divides the global batch.
        LossError: there is no loss, or it has no gradient.
        UnsupportedError: no combination can be traced. If some can, the rows of the others say what stands in the way.
    """
    target = find(device)
    limit = budget_of(target, budget)
    if limit is None:
        raise ConfigError(
            f"device={device!r} has no memory of its own in the table; give budget, such as budget='8GiB'"
        )
    _check(precisions, optimizers, recompute, attention)
    allowed = _divisors(global_batch_size, micro_batches)
    rows: list[Configuration] = []
    refusals: list[UnsupportedError] = []
    for kernel, optimizer, precision, again in product(attention, optimizers, precisions, recompute):
        options, prepare = preparation(again, EngineOptions())
        step = StepForecaster(
            partial(made, partial(_with_attention, model_fn, kernel), batch_fn(1)),
            batch_fn,
            StepRecipe(maker(optimizer), loss, precision, 1, max_norm, loop=loop),
            target,
            prepare,
            expandable_segments,
            placed("ddp", 1, options, precision, 1, "cuda" if target.is_cuda else "cpu"),
            counts_work=True,
            can_repeat=treats_blocks_alike(options),
        )
        blank = Configuration(
            allowed[-1], global_batch_size // allowed[-1], again is not False, precision, _name(optimizer), kernel
        )
        try:
            rows.append(_fill_row(blank, step, limit, allowed))
        except UnsupportedError as error:
            refusals.append(error)
            rows.append(replace(blank, problem=str(error)))
        except ConfigError as error:  # a model without blocks to compute again can still be trained without that
            if again is False or False not in recompute:
                raise
            rows.append(replace(blank, problem=str(error)))
    if len(refusals) == len(rows):
        raise refusals[0]
    return _ranked(rows)


def _fill_row(blank: Configuration, step: StepForecaster, limit: int, allowed: list[int]) -> Configuration:
    """The row of the largest allowed micro-batch that fits; where none does, of the smallest."""
    whole = blank.micro_batch * blank.accumulation
    capacity = room(step.device, limit)
    # Gradients are held while the next micro-batch runs; after the second, nothing more is.
    window = replace(step, recipe=replace(step.recipe, accumulation=2))
    sketched = dict(window.curve(allowed))
    if allowed[0] == whole and (len(allowed) == 1 or sketched.get(whole, 0) - _weights(window) <= capacity):
        row = _row(blank, step, whole, limit)
        if row.fits or len(allowed) == 1:
            return row
    smaller = [size for size in allowed if size < whole]
    bound = smaller[0] if sketched else window.largest(capacity, smaller[0])[0]
    fitting = [size for size in smaller if size <= bound and sketched.get(size, 0) <= capacity]
    for size in [*fitting, smaller[-1]]:
        row = _row(blank, window, size, limit)
        if row.fits:
            break
    return row


def _weights(step: StepForecaster) -> int:
    """Bytes of the model's weights, which are as many as its gradients take."""
    return sum(event.num_bytes for event in step.trace(PROBE).events if event.kind == "weights" and event.num_bytes > 0)


def _row(blank: Configuration, step: StepForecaster, size: int, limit: int) -> Configuration:
    answer = step.forecast(size, limit)
    accumulation = blank.micro_batch * blank.accumulation // size
    work = _update(step.trace(size), step.recipe.accumulation, accumulation)
    found = replace(blank, micro_batch=size, accumulation=accumulation, cost=work.seconds, work=work)
    return replace(found, least=answer.least, total=answer.total, most=answer.most, fits=answer.fits)


def _update(traced: Trace, accumulated: int, accumulation: int) -> StepWork:
    """The work of one update, from the last step that was traced, which had `accumulated` micro-batches."""
    of = [traced.work.get(f"step {STEPS} {part}", StepWork()) for part in ("forward", "backward", "update")]
    return (of[0] + of[1]) * (accumulation / accumulated) + of[2]


def _ranked(rows: list[Configuration]) -> list[Configuration]:
    costs = [row.cost for row in rows if row.cost is not None and row.fits] or [
        row.cost for row in rows if row.cost is not None
    ]
    found = [row if row.cost is None else replace(row, cost=row.cost / min(costs)) for row in rows]
    return sorted(found, key=lambda row: (bool(row.problem), _FITTING[row.fits], row.cost or 0.0, row.most))


def _with_attention(model_fn: Callable[[], nn.Module], kernel: str | None) -> nn.Module:
    model = model_fn()
    if kernel is None:
        return model
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"attention={kernel!r}: {type(model).__name__} has no set_attn_implementation; choose the kernel in model_fn"
        )
    model.set_attn_implementation(kernel)  # type: ignore[operator]
    return model


def _divisors(whole: int, micro_batches: Sequence[int] | None) -> list[int]:
    """The micro-batches that divide the global batch, the largest first."""
    check_count(global_batch_size=whole)
    among = range(1, whole + 1) if micro_batches is None else micro_batches
    wrong = [size for size in among if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong:
        raise ConfigError(f"micro_batches has {wrong[0]!r}; each is a number of 1 or more")
    found = sorted({size for size in among if whole % size == 0}, reverse=True)
    if not found:
        raise ConfigError(
            f"none of micro_batches={list(among)} divides global_batch_size={whole}; give sizes that do, or none"
        )
    return found


def _check(precisions: Sequence[str], *others: Sequence[Any]) -> None:
    for name, given in zip(("precisions", "optimizers", "recompute", "attention"), (precisions, *others)):
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError(f"{name}={given!r}; give a tuple of one or more")
    for precision in precisions:
        if precision not in PRECISIONS:
            raise ConfigError(f"precisions has {precision!r}; allowed: {', '.join(PRECISIONS)}")


def _name(optimizer: Optimizer) -> str:
    return optimizer if isinstance(optimizer, str) else str(getattr(optimizer, "__name__", type(optimizer).__name__))


def table(rows: Sequence[Configuration]) -> str:
    """The rows for people, as they are ranked."""
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
    return "\n".join(columns(lines))
