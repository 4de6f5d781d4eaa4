"""`headway.forecast`: what a training step will take on a card, and the largest batch that fits, from one that is not there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.config.strategies import ActivationCheckpointing
from headway.errors import ConfigError
from headway.forecasting.allocator import Replay, replay
from headway.forecasting.devices import Device, find, room, spread
from headway.forecasting.events import Event, plain_peak, split_at
from headway.forecasting.fake import trace
from headway.forecasting.solve import Largest, LongestSequence, Search
from headway.forecasting.step import Loss, Recipe
from headway.forecasting.timeline import Timeline, timeline
from headway.forecasting.trace import Trace
from headway.planning.optimizers import Optimizer, maker
from headway.planning.rehearsal import rehearse
from headway.planning.sources import unmasked
from headway.recompute.checkpointing import checkpoint_activations
from headway.units import format_bytes, parse_bytes

PRECISIONS = ("no", "bf16", "fp16")
Recompute = bool | ActivationCheckpointing | Callable[[nn.Module], object]


_POINTS = 24
"""Batches of `Forecast.by_batch`."""


@dataclass(frozen=True)
class Forecast:
    """What a training step takes on a device. Sizes are bytes.

    Attributes:
        device: of the table in docs/forecast.md.
        batch_size: samples of a micro-batch.
        allocated: the most that tensors take at once (`torch.cuda.max_memory_allocated`).
        reserved: the most that torch's allocator takes from the card (`torch.cuda.max_memory_reserved`).
        least: in use on the device at least, context and libraries included; what `nvidia-smi` shows.
        total: likely in use on the device.
        most: in use at most; the margin is in docs/forecast.md.
        split: `allocated`, by what it is held for.
        peak: where in the step it is reached: "step 2 backward".
        peak_line: the line that asked for the memory with which it was reached; "" where it is none of the user's.
        budget: bytes that were to suffice; None: unknown.
        fits: even the most stays within the budget; False: not even the least does; None: it is too close to tell.
        largest_batch: whose most stays within the budget; None: it was not looked for.
        longest_sequence: whose most stays within the budget, at `batch_size`; None: it was not looked for.
        timeline: `allocated` over the requests of the two steps, by what it is held for.
        by_batch: (batch, `most`) of some batches up to beyond the largest; empty where that was not looked for.
        num_traces: steps that were traced.
        seconds: that the forecast took.
        caveats: what it cannot vouch for.
    """

    device: str
    batch_size: int
    allocated: int
    reserved: int
    least: int
    total: int
    most: int
    split: dict[str, int]
    peak: str
    peak_line: str
    budget: int | None
    fits: bool | None
    largest_batch: int | None
    longest_sequence: int | None
    timeline: Timeline
    by_batch: tuple[tuple[int, int], ...]
    num_traces: int
    seconds: float
    caveats: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Lines for people."""
        lines = [
            f"{self.device}, batch {self.batch_size}: {format_bytes(self.total)} "
            f"({format_bytes(self.least)} to {format_bytes(self.most)})",
            f"tensors {format_bytes(self.allocated)}, allocator {format_bytes(self.reserved)}; the most in {self.peak}"
            + (f", at {self.peak_line}" if self.peak_line else ""),
            *(f"  {kind:<16} {format_bytes(size):>10}" for kind, size in self.split.items()),
        ]
        if self.budget is not None:
            answer = {True: "fits", False: "does not fit", None: "may fit: it is too close to tell"}[self.fits]
            lines.append(f"{answer} into {format_bytes(self.budget)}")
        if self.largest_batch is not None:
            lines.append(f"largest batch: {self.largest_batch}")
        if self.longest_sequence is not None:
            lines.append(f"longest sequence in a batch of {self.batch_size}: {self.longest_sequence:,}")
        lines += [f"note: {caveat}" for caveat in self.caveats]
        return "\n".join([*lines, f"{self.num_traces} step(s) traced in {self.seconds:.1f} s"])


def forecast(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
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
    expandable_segments: bool = False,
    largest: bool = True,
    longest: LongestSequence | None = None,
) -> Forecast:
    """Say what a training step takes on a device that need not be here.

    The model's own step is traced twice over on tensors without values, in seconds, and its allocations are answered by a model of
    CUDA's caching allocator. The batch that `batch_fn` gives is called as `model(**batch)` where it is a mapping, as
    `model(batch[0])` where it is a tuple or list of inputs and targets, and as `model(batch)` otherwise.

    Args:
        model_fn: makes the model, here without memory.
        batch_fn: gives a micro-batch of so many samples; its values do not matter.
        batch_size: samples of the micro-batch that is forecast.
        optimizer: a name ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop", "none"), or a function that makes the
            optimizer from parameters.
        loss: from the model's outputs and the batch's targets; None: the model returns it, or an object that has it as `loss`.
        device: a name of the table in docs/forecast.md.
        budget: bytes, or text such as "24GiB", that the whole process may take; None: all memory of the device.
        precision: "no", "bf16" or "fp16", by autocast; a model in another dtype is what `model_fn` gives.
        recompute: activation checkpointing: True, what `checkpoint_activations` takes, or a function that is given the model.
        accumulation: micro-batches of one update.
        max_norm: gradients are clipped to this norm.
        expandable_segments: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        largest: also look for the largest batch within the budget.
        longest: also look for the longest sequence within the budget, at `batch_size`.

    Raises:
        ConfigError: an argument that cannot be.
        LossError: there is no loss, or it has no gradient.
        UnsupportedError: the step cannot be traced; the operation and the line are named.
    """
    began = time.perf_counter()
    _check(batch_size, precision, accumulation)
    target = find(device)
    limit = target.memory if budget is None else parse_bytes(budget)
    recipe = Recipe(maker(optimizer), loss, precision, accumulation, max_norm)
    tracer = _Tracer(model_fn, batch_fn, recipe, target, _preparation(recompute, target), expandable_segments)
    traced = tracer.trace(batch_size)
    capacity = None if limit is None else room(target, limit)
    found, by_batch = tracer.largest(capacity) if largest and capacity is not None else (None, ())
    length = tracer.longest(longest, batch_size, capacity) if longest is not None and capacity is not None else None
    return replace(
        _of_trace(traced, target, batch_size, limit, expandable_segments),
        largest_batch=None if found is None else found.batch,
        longest_sequence=length,
        by_batch=tuple((size, spread(target, taken)[2]) for size, taken in by_batch),
        num_traces=tracer.num_traces,
        seconds=time.perf_counter() - began,
        caveats=(*traced.caveats, *_caveats(batch_fn, target)),
    )


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
    limit = target.memory if budget is None else parse_bytes(budget)
    found = rehearse(script, arguments, target)
    caveats = [*found.trace.caveats, *_of_device(target)]
    if found.is_partial:
        caveats.append("the script ended after its first update; what later ones take on top is not in the numbers")
    made = _of_trace(found.trace, target, found.batch_size or 0, limit, expandable_segments)
    return replace(made, seconds=time.perf_counter() - began, caveats=tuple(caveats))


def _of_trace(traced: Trace, target: Device, batch_size: int, limit: int | None, is_expandable: bool) -> Forecast:
    answer = _replayed(traced.events, target, is_expandable)
    least, total, most = spread(target, answer.reserved)
    return Forecast(
        device=target.name,
        batch_size=batch_size,
        allocated=answer.allocated,
        reserved=answer.reserved,
        least=least,
        total=total,
        most=most,
        split=split_at(traced.events, answer.peak),
        peak=_phase_at(traced.phases, answer.peak),
        peak_line=traced.events[answer.peak].where,
        budget=limit,
        fits=None if limit is None else _fits(least, most, limit),
        largest_batch=None,
        longest_sequence=None,
        timeline=timeline(traced.events, traced.phases),
        by_batch=(),
        num_traces=1,
        seconds=0.0,
        caveats=traced.caveats,
    )


def _replayed(events: list[Event], device: Device, is_expandable: bool) -> Replay:
    found = replay(events, expandable=is_expandable)
    if device.is_cuda:
        return found
    exact = plain_peak(events)  # a CPU's allocator rounds nothing and keeps nothing
    return Replay(exact, exact, 0, True, found.peak)


class _Tracer:
    """Traces steps of any batch, each batch once."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch_fn: Callable[[int], Any],
        recipe: Recipe,
        device: Device,
        prepare: Callable[[nn.Module], object] | None,
        is_expandable: bool,
    ) -> None:
        self._model_fn = model_fn
        self._batch_fn = batch_fn
        self._recipe = recipe
        self._device = device
        self._prepare = prepare
        self._is_expandable = is_expandable
        self._traces: dict[int, Trace] = {}
        self.num_traces = 0

    def trace(self, batch_size: int) -> Trace:
        if batch_size not in self._traces:
            self._traces[batch_size] = self._of(partial(self._batch_fn, batch_size))
        return self._traces[batch_size]

    def _of(self, batch: Callable[[], Any]) -> Trace:
        self.num_traces += 1
        return trace(self._make, batch, self._recipe, self._device, self._prepare)

    def largest(self, capacity: int) -> tuple[Largest, Sequence[tuple[int, int]]]:
        search = Search(lambda size: self.trace(size).events, self._reserved, capacity)
        found = search.run()
        end = max(8, found.batch + found.batch // 4)
        return found, search.curve(sorted({max(1, round(end * part / _POINTS)) for part in range(1, _POINTS + 1)}))

    def longest(self, longest: LongestSequence, batch_size: int, capacity: int) -> int:
        unit = longest.multiple
        search = Search(
            lambda size: self._of(partial(longest.batch_fn, batch_size, size * unit)).events,
            self._reserved,
            capacity,
            longest.limit // unit,
            degree=2,
        )
        return search.run().batch * unit

    def _reserved(self, events: list[Event]) -> int:
        return _replayed(events, self._device, self._is_expandable).reserved

    def _make(self) -> nn.Module:
        model = self._model_fn()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model_fn returned {type(model).__name__}; it must return a torch.nn.Module")
        # A mask in the batch is looked into by transformers, which takes another way if nothing is masked.
        return unmasked(model) if hasattr(model, "set_attn_implementation") else model


def _preparation(recompute: Recompute, device: Device) -> Callable[[nn.Module], object] | None:
    if recompute is False:
        return None
    if isinstance(recompute, ActivationCheckpointing) or recompute is True:
        plan = recompute if isinstance(recompute, ActivationCheckpointing) else ActivationCheckpointing()
        if plan.offload:
            raise ConfigError(
                "recompute=ActivationCheckpointing(offload=True) cannot be forecast yet; leave offload out"
            )
        return lambda model: checkpoint_activations(model, plan, torch.device("cpu"))
    return recompute


def _check(batch_size: int, precision: str, accumulation: int) -> None:
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r}; allowed: {', '.join(PRECISIONS)}")
    for name, value in (("batch_size", batch_size), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; give a number of 1 or more")


def _fits(least: int, most: int, budget: int) -> bool | None:
    if most <= budget:
        return True
    return False if least > budget else None


def _phase_at(phases: dict[str, int], index: int) -> str:
    begun = [(first, phase) for phase, first in phases.items() if first <= index]
    return max(begun)[1]


def _of_device(device: Device) -> list[str]:
    return [f"overhead of {device.name}: {device.source}"] if device.is_cuda else []


def _caveats(batch_fn: Callable[[int], Any], device: Device) -> tuple[str, ...]:
    found = _of_device(device)
    batch = batch_fn(1)
    if isinstance(batch, dict) and "attention_mask" in batch:
        found.append(
            "the batch has an attention_mask, whose values are not known here: transformers then builds a mask for every layer, "
            "which a run leaves out where no token is padding"
        )
    return tuple(found)
