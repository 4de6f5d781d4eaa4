"""What a forecast says: a trace's events answered by a model of the target's allocator, as numbers with their margin, over time."""

from dataclasses import asdict, dataclass
from typing import Any

from headway.common.garbage import no_garbage_search
from headway.common.text import format_bytes
from headway.forecasting.device.allocator import (
    KINDS,
    AllocationReplay,
    MemoryEvent,
    plain_peak,
    replay,
    split_at,
    told_apart,
)
from headway.forecasting.device.devices import Device, spread
from headway.forecasting.tracing.trace import Trace

POINTS = 400


@dataclass(frozen=True)
class Timeline:
    """Memory in use after chosen requests of a step.

    Attributes:
        places: the request's number, rising; of each stretch of requests the one with the most memory in use.
        sizes: kind -> bytes at each place, for the kinds that occur, in the order in which they are shown.
        phases: (phase, number of its first request): "step 1 forward", ...
    """

    places: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    phases: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all kinds at each place."""
        return tuple(map(sum, zip(*self.sizes.values())))


def timeline(events: list[MemoryEvent], phases: dict[str, int], points: int = POINTS) -> Timeline:
    """The timeline of a trace.

    Args:
        events: in order, with their kinds.
        phases: the index of each phase's first event.
        points: at most so many places.
    """
    stretch = max(1, -(-len(events) // points))
    held = dict.fromkeys(KINDS, 0)
    total, best = 0, -1
    chosen: tuple[int, ...] = ()
    place = 0
    places: list[int] = []
    rows: list[tuple[int, ...]] = []
    for index, event in enumerate(events):
        held[event.kind] += event.num_bytes
        total += event.num_bytes
        if total > best:
            best, place, chosen = total, index, tuple(held.values())
        if (index + 1) % stretch == 0 or index == len(events) - 1:
            places.append(place)
            rows.append(chosen)
            best = -1
    columns = dict(zip(KINDS, zip(*rows))) if rows else {}
    sizes = {kind: column for kind, column in columns.items() if any(column)}
    return Timeline(tuple(places), sizes, tuple(sorted(phases.items(), key=lambda pair: pair[1])))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a training step takes on a device. Sizes are bytes.

    Attributes:
        device: one of those listed in docs/forecast.md.
        batch_size: samples of a micro-batch.
        allocated: the most that tensors take at once (`torch.cuda.max_memory_allocated`).
        reserved: the most that torch's allocator takes from the card (`torch.cuda.max_memory_reserved`).
        least: in use on the device at least, context and libraries included; what `nvidia-smi` shows.
        total: likely in use on the device.
        most: in use at most; the margin is in docs/forecast_reference.md.
        split: `allocated`, by what it is held for.
        peak: where in the step it is reached: "step 2 backward".
        peak_line: the line that asked for the memory with which it was reached; "" where it is none of the user's.
        budget: bytes that were to suffice; None: unknown.
        fits: even the most stays within the budget; False: not even the least does; None: it is too close to tell.
        largest_batch: whose most stays within the budget; None: it was not looked for.
        longest_sequence: whose most stays within the budget, at `batch_size`; None: it was not looked for.
        timeline: `allocated` over the requests of the steps, by what it is held for.
        by_batch: (batch, `most`) of some batches up to beyond the largest; empty where that was not looked for.
        num_traces: steps that were traced.
        seconds: that the forecast took.
        caveats: what it cannot vouch for.
        strategy: over ranks; "" or "ddp" on one of them: one process.
        num_ranks: of the run; the numbers are those of rank 0.
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
    largest_batch: int | None = None
    longest_sequence: int | None = None
    timeline: Timeline
    by_batch: tuple[tuple[int, int], ...] = ()
    num_traces: int = 1
    seconds: float = 0.0
    caveats: tuple[str, ...]
    strategy: str = ""
    num_ranks: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Lines for people."""
        lines = [
            f"{self.device}, {self._where()}batch {self.batch_size}: {format_bytes(self.total)} "
            f"({format_bytes(self.least)} to {format_bytes(self.most)}: context, libraries and workspaces vary)",
            f"tensors {format_bytes(self.allocated)}, allocator {format_bytes(self.reserved)}; the most in {self.peak}"
            + (f", at {self.peak_line}" if self.peak_line else ""),
            *(f"  {kind:<16} {format_bytes(size):>10}" for kind, size in self.split.items()),
        ]
        if self.budget is not None:
            answer = {True: "fits", False: "does not fit", None: "may fit: it is too close to tell"}[self.fits]
            lines.append(f"{answer} into {format_bytes(self.budget)}")
        if self.largest_batch is not None:
            why = (
                "even the most in use stays within the budget"
                if self.largest_batch
                else "not even one sample is sure to fit"
            )
            lines.append(f"largest batch: {self.largest_batch} ({why})")
        if self.longest_sequence is not None:
            lines.append(f"longest sequence in a batch of {self.batch_size}: {self.longest_sequence:,}")
        lines += [f"note: {caveat}" for caveat in self.caveats]
        return "\n".join([*lines, f"{self.num_traces} step(s) traced in {self.seconds:.1f} s"])

    def _where(self) -> str:
        return f"rank 0 of {self.num_ranks:,} under {self.strategy}, " if self.num_ranks > 1 else ""


@no_garbage_search()
def of_trace(traced: Trace, target: Device, batch_size: int, limit: int | None, is_expandable: bool) -> Forecast:
    """A forecast of what was traced, with nothing searched for.

    Args:
        traced: two steps or more.
        target: the device.
        batch_size: samples of a micro-batch.
        limit: bytes that the whole process may take; None: unknown.
        is_expandable: as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    """
    events, unsure = told_apart(traced.events)
    answer = replayed(events, target, is_expandable)
    least, total, most = spread(target, answer.reserved)
    most += unsure
    return Forecast(
        device=target.name,
        batch_size=batch_size,
        allocated=answer.allocated,
        reserved=answer.reserved,
        least=least,
        total=total,
        most=most,
        split=split_at(events, answer.peak),
        peak=_phase_at(traced.phases, answer.peak),
        peak_line=events[answer.peak].where,
        budget=limit,
        fits=None if limit is None else _fits(least, most, limit),
        timeline=timeline(events, traced.phases),
        caveats=(*traced.caveats, *target.caveats),
    )


def replayed(events: list[MemoryEvent], device: Device, is_expandable: bool) -> AllocationReplay:
    """What a device's allocator takes for these events."""
    found = replay(events, expandable=is_expandable)
    if device.is_cuda:
        return found
    exact = plain_peak(events)  # a CPU's allocator rounds nothing and keeps nothing
    return AllocationReplay(exact, exact, found.peak)


def _fits(least: int, most: int, budget: int) -> bool | None:
    if most <= budget:
        return True
    return False if least > budget else None


def _phase_at(phases: dict[str, int], index: int) -> str:
    begun = [(first, phase) for phase, first in phases.items() if first <= index]
    return max(begun)[1]
