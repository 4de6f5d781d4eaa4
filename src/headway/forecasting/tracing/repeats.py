"""Extrapolate a trace of a model with a few of its repeated blocks to the model with all blocks.

A model is traced with three, four and five of its repeated blocks. The events that the fourth block adds must repeat
the events before them. Adding them once more must give exactly the events with five blocks, and every free must match
its own allocation. If all of this is true, the events of the remaining blocks are added by further repetition.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.errors import HeadwayError
from headway.forecasting.tracing.event_runs import (
    EventRun,
    apply_size,
    expand_runs,
    expand_tokens,
    find_runs,
    make_tokens,
    merge_tokens,
)
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.work import StepWork

FEWEST_TRACED = 3
"""Number of repetitions of the model's repeated blocks in the smallest of three traces.

The other two traces have one and two repetitions more.
"""


def trace_repeated(
    trace_model: Callable[[int], Trace], count: int, proofs: "list[RepeatProof] | None" = None
) -> Trace | None:
    """Return the trace of a model with many repeated blocks, after tracing only a few of them.

    A repetition is one occurrence of the sequence of blocks that the model repeats.

    Args:
        trace_model: Function that traces the model, shortened to a given number of repetitions.
        count: Number of repetitions in the full model.
        proofs: Results of earlier calls with other batches of the model. If one of them has the same sequence of events
            as this batch, one trace is enough instead of three. A new result is appended. Default: None.

    Returns:
        The trace of the full model, or None if the repetitions differ or the model cannot be traced with fewer blocks.
    """
    proofs = [] if proofs is None else proofs
    try:
        second = trace_model(FEWEST_TRACED + 1)
        for proof in proofs:
            extrapolated = proof.apply_to(second, count)
            if extrapolated is not None:
                return extrapolated
        first = trace_model(FEWEST_TRACED)
        runs = find_runs(make_tokens(first), make_tokens(second))
        if runs is None:
            return None
        third = trace_model(FEWEST_TRACED + 2)
    except HeadwayError:  # some models cannot be called with fewer blocks than their config says
        return None
    proof = RepeatProof(runs, first, second)
    if _summarize_trace(first) != _summarize_trace(third):
        return None
    if third.unsure_bytes != second.unsure_bytes + proof.unsure_growth:
        return None
    if expand_runs(runs, 2) != expand_tokens(make_tokens(third)):
        return None
    proofs.append(proof)
    return _extrapolate_trace(runs, first, second, count, proof.unsure_growth)


def _extrapolate_trace(
    runs: list[EventRun], first: Trace, second: Trace, count: int, unsure_growth: int
) -> Trace | None:
    """Return the trace with `count` repetitions, or None if a free would have no matching allocation.

    Args:
        runs: Event descriptions, split into sequences that are repeated and sequences that are not.
        first: Trace of the model with `FEWEST_TRACED` (3) repetitions of its repeated blocks.
        second: Trace of the model with one repetition more than `first`.
        count: Number of repetitions to extrapolate to.
        unsure_growth: Bytes that each further repetition adds to the memory that a run might need in addition.
    """
    expanded = expand_runs(runs, count - FEWEST_TRACED)
    if expanded is None:
        return None
    events, phase_starts = expanded
    num_added = count - FEWEST_TRACED - 1
    operations = {
        name: calls + num_added * (calls - first.operations.get(name, 0)) for name, calls in second.operations.items()
    }
    work = {phase: _extrapolate_work(first.work[phase], later, num_added) for phase, later in second.work.items()}
    return replace(
        second,
        events=events,
        phase_starts=phase_starts,
        operations=operations,
        work=work,
        unsure_bytes=second.unsure_bytes + num_added * unsure_growth,
    )


@dataclass(frozen=True)
class RepeatProof:
    """Events that each further repetition of a model's repeated blocks adds to a trace.

    They were verified with three traces of one batch.

    Attributes:
        runs: Event descriptions, split into sequences that are repeated and sequences that are not.
        first: Trace of the model with `FEWEST_TRACED` (3) repetitions of the blocks.
        second: Trace of the model with one repetition more than `first`.
    """

    runs: list[EventRun]
    first: Trace
    second: Trace

    @property
    def unsure_growth(self) -> int:
        """Bytes that a further repetition of the blocks adds to the memory that a run might need in addition."""
        return self.second.unsure_bytes - self.first.unsure_bytes

    def apply_to(self, trace: Trace, count: int) -> Trace | None:
        """Extrapolate the trace of another batch to the full model.

        Args:
            trace: Trace of the other batch, with `FEWEST_TRACED` + 1 (4) repetitions of the model's repeated blocks.
            count: Number of repetitions to extrapolate to.

        Returns:
            The trace with `count` repetitions, or None. It is None if the trace differs from the verified trace in more
            than the bytes of its events. It is also None if the events that a repetition adds do not repeat those
            before them, or if work was counted. Work is excluded because it can grow differently with another batch.
        """
        if (
            trace.work
            or _summarize_trace(trace) != _summarize_trace(self.second)
            or trace.operations != self.second.operations
        ):
            return None
        if self.unsure_growth and trace.unsure_bytes != self.second.unsure_bytes:
            return None  # the growth was verified only for these bytes
        tokens = make_tokens(trace)
        begin = 0
        runs: list[EventRun] = []
        # `self.runs` describes a trace with 4 repetitions, so its tokens correspond one to one to those of `trace`.
        for run in self.runs:
            end = begin + len(run.tokens)
            current = tokens[begin:end]
            resized = list(map(apply_size, run.tokens, current))  # shorter if `trace` has too few events
            if len(resized) < len(run.tokens) or None in resized:
                return None
            # At this batch size, too, the added events must repeat those just before them.
            previous = tokens[begin - len(resized) : begin]
            if run.is_repeated and not all(map(merge_tokens, previous, current)):
                return None
            runs.append(EventRun([token for token in resized if token], run.is_repeated))
            begin = end
        # A trace that is rebuilt from the runs must match each free to the allocation that it frees in `trace`.
        if begin < len(tokens) or expand_runs(runs, 1) != expand_tokens(tokens):
            return None
        return _extrapolate_trace(runs, self.first, trace, count, self.unsure_growth)


def _summarize_trace(trace: Trace) -> Any:
    """Return the properties of a trace that must not depend on the number of repeated blocks.

    These are its caveats, the names of its phases and operations, and whether a run might need more memory.
    """
    phases = [start.phase for start in trace.phase_starts]
    return trace.caveats, phases, set(trace.operations), trace.unsure_bytes > 0


def _extrapolate_work(before: StepWork, now: StepWork, steps: int) -> StepWork:
    """Extrapolate the work of a step (FLOPs, bytes and kernel launches) linearly to more repetitions of the blocks.

    Args:
        before: Work with one repetition less than `now`.
        now: Work to extrapolate from.
        steps: Number of repetitions to add to those of `now`.
    """
    extrapolated: dict[str, Any] = {}
    for field in fields(StepWork):
        less, more = getattr(before, field.name), getattr(now, field.name)
        extrapolated[field.name] = more + steps * (more - less)
    return StepWork(**extrapolated)
