"""Extrapolate a trace of a model with a few of its repeated blocks to the model with all blocks.

A model is traced with three, four and five of its repeated blocks. The events that the fourth block adds must repeat
the events before them. Adding them once more must give exactly the events with five blocks, and every free must match
its own allocation. If all of this is true, the events of the remaining blocks are added by further repetition.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import starmap, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.common.garbage import pause_garbage_collection
from headway.errors import HeadwayError
from headway.forecasting.device.allocator import MemoryEvent
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.work import StepWork

FEWEST = 16
"""Minimum number of repetitions of a sequence of blocks for which extrapolation saves time.

Extrapolation needs traces of the model with 3, 4 and 5 repetitions, which together cost as much as one with 12.
"""
TRACED = 3
"""Number of repetitions of the model's repeated blocks in the smallest of three traces.

The other two traces have one and two repetitions more.
"""
_AHEAD = 24
"""Number of events after an inserted sequence that are compared to find the length of the sequence."""

_Kin = tuple[int, str, str, int]
"""Tuple of (bytes, operation, kind, stream) of an allocation.

Allocations with equal tuples are called kin. They cannot be distinguished without their keys.
"""
_Expanded = tuple[list[MemoryEvent], dict[str, int]]
"""Pair of a list of events with keys, and a dict that maps each phase to the index of its first event."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """Location of a model's repeated blocks: a ModuleList or Sequential that is periodic from index `start` to its end.

    A repetition is one occurrence of the sequence of `period` blocks.

    Attributes:
        path: Path of the ModuleList or Sequential in the model.
        length: Number of blocks in the ModuleList or Sequential.
        period: Number of blocks after which the same sequence of blocks starts again.
        start: Index of the first block that is part of the repetition.
    """

    path: str
    length: int
    period: int
    start: int

    @property
    def count(self) -> int:
        """Number of times that the sequence of `period` blocks is repeated."""
        return (self.length - self.start) // self.period

    def shorten(self, model: nn.Module, count: int) -> None:
        """Delete blocks at the end of the list in place until the sequence of blocks occurs `count` times.

        Args:
            model: Model with the repeated blocks.
            count: Number of occurrences to keep.
        """
        blocks: Any = model.get_submodule(self.path)
        del blocks[self.length - (self.count - count) * self.period :]

    def name_in_first(self, name: str) -> str:
        """Return the name of the parameter that corresponds to the given one in the first sequence of repeated blocks.

        The name of a parameter outside of the repeated blocks is returned unchanged.

        Args:
            name: Name of a parameter in the model.
        """
        prefix = f"{self.path}." if self.path else ""
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not index.isdecimal() or int(index) < self.start:
            return name
        return f"{prefix}{self.start + (int(index) - self.start) % self.period}{dot}{rest}"


def find_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """Return the location of the model's repeated blocks, or None if no sequence repeats at least `FEWEST` times.

    If there are several lists of repeated blocks, the one with the most modules is used.
    """
    found: list[tuple[int, RepeatedBlocks]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < FEWEST:
            continue
        blocks = list(module)
        descriptions = _describe_blocks(blocks)
        for period in range(1, len(blocks) // FEWEST + 1):
            start = len(blocks) - period
            while start > 0 and descriptions[start - 1] == descriptions[start - 1 + period]:
                start -= 1
            repeated = RepeatedBlocks(path, len(blocks), period, start)
            if repeated.count >= FEWEST:
                found.append((sum(1 for block in blocks[start:] for _ in block.modules()), repeated))
                break
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _describe_blocks(blocks: Sequence[nn.Module]) -> list[Any]:
    """Return a description of each block. Two blocks are treated as equal if their descriptions are equal.

    An attribute that equals the block's index in every block is left out.
    """
    all_parts = [{name: _describe_module(module) for name, module in block.named_modules()} for block in blocks]
    numbers = {
        (name, key)
        for name, (_, values, _) in all_parts[0].items()
        for key in values
        if all(parts.get(name, (0, {}, 0))[1].get(key, -1) == index for index, parts in enumerate(all_parts))
    }
    return [
        {
            name: (kind, {key: value for key, value in values.items() if (name, key) not in numbers}, held)
            for name, (kind, values, held) in parts.items()
        }
        for parts in all_parts
    ]


def _describe_module(module: nn.Module) -> tuple[type, dict[str, Any], list[Any]]:
    """Return a description of a module: its type, its attributes and hooks, and its parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    held = [
        (name, each if each is None else (each.shape, each.dtype, each.requires_grad)) for name, each in own.items()
    ]
    values = {
        key: value if isinstance(value, bool | int | float | str | tuple | torch.dtype) else type(value)
        for key, value in vars(module).items()
    }
    hooks = {f"{key}()": len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
    return type(module), values | hooks, held


def trace_repeated(
    trace: Callable[[int], Trace], count: int, proofs: "list[RepeatProof] | None" = None
) -> Trace | None:
    """Return the trace of a model with many repeated blocks, after tracing only a few of them.

    A repetition is one occurrence of the sequence of blocks that the model repeats.

    Args:
        trace: Function that traces the model, shortened to a given number of repetitions.
        count: Number of repetitions in the full model.
        proofs: Results of earlier calls with other batches of the model. If one of them has the same sequence of events
            as this batch, one trace is enough instead of three. A new result is appended. Default: None.

    Returns:
        The trace of the full model, or None if the repetitions differ or the model cannot be traced with fewer blocks.
    """
    proofs = [] if proofs is None else proofs
    try:
        second = trace(TRACED + 1)
        for proof in proofs:
            found = proof.apply_to(second, count)
            if found is not None:
                return found
        first = trace(TRACED)
        pieces = _find_pieces(_make_tokens(first), _make_tokens(second))
        if pieces is None:
            return None
        third = trace(TRACED + 2)
    except HeadwayError:  # some models cannot be called with fewer blocks than their config says
        return None
    if _summarize_trace(first) != _summarize_trace(third) or _expand_pieces(pieces, 2) != _expand_pieces(
        [_EventRun(_make_tokens(third))], 0
    ):
        return None
    proofs.append(RepeatProof(pieces, first, second))
    return _extrapolate_trace(pieces, first, second, count)


def _extrapolate_trace(pieces: "list[_EventRun]", first: Trace, second: Trace, count: int) -> Trace | None:
    """Return the trace with `count` repetitions, or None if a free would have no matching allocation.

    Args:
        pieces: Event descriptions, split into sequences that are repeated and sequences that are not.
        first: Trace of the model with `TRACED` (3) repetitions of its repeated blocks.
        second: Trace of the model with one repetition more than `first`.
        count: Number of repetitions to extrapolate to.
    """
    expanded = _expand_pieces(pieces, count - TRACED)
    if expanded is None:
        return None
    events, phases = expanded
    ahead = count - TRACED - 1
    operations = {
        name: times + ahead * (times - first.operations.get(name, 0)) for name, times in second.operations.items()
    }
    work = {phase: _extrapolate_work(first.work[phase], done, ahead) for phase, done in second.work.items()}
    return replace(second, events=events, phases=phases, operations=operations, work=work)


@dataclass(frozen=True)
class RepeatProof:
    """Events that each further repetition of a model's repeated blocks adds to a trace.

    They were verified with three traces of one batch.

    Attributes:
        pieces: Event descriptions, split into sequences that are repeated and sequences that are not.
        first: Trace of the model with `TRACED` (3) repetitions of the blocks.
        second: Trace of the model with one repetition more than `first`.
    """

    pieces: "list[_EventRun]"
    first: Trace
    second: Trace

    def apply_to(self, traced: Trace, count: int) -> Trace | None:
        """Extrapolate the trace of another batch to the full model.

        Args:
            traced: Trace of the other batch, with `TRACED` + 1 (4) repetitions of the model's repeated blocks.
            count: Number of repetitions to extrapolate to.

        Returns:
            The trace with `count` repetitions, or None. It is None if the trace differs from the verified trace in more
            than the bytes of its events. It is also None if the events that a repetition adds do not repeat those
            before them, or if work was counted. Work is excluded because it can grow differently with another batch.
        """
        if (
            traced.work
            or _summarize_trace(traced) != _summarize_trace(self.second)
            or traced.operations != self.second.operations
        ):
            return None
        tokens, here = _make_tokens(traced), 0
        pieces: list[_EventRun] = []
        for piece in self.pieces:
            end = here + len(piece.tokens)
            sized = list(map(_apply_size, piece.tokens, tokens[here:end]))
            repeats = not piece.is_repeated or all(
                map(_merge_tokens, tokens[here - len(sized) : here], tokens[here:end])
            )
            if len(sized) < len(piece.tokens) or None in sized or not repeats:
                return None
            pieces.append(_EventRun([token for token in sized if token], piece.is_repeated))
            here = end
        if here < len(tokens) or _expand_pieces(pieces, 1) != _expand_pieces([_EventRun(tokens)], 0):
            return None
        return _extrapolate_trace(pieces, self.first, traced, count)


def _summarize_trace(traced: Trace) -> Any:
    """Return the properties of a trace that must not depend on the number of repeated blocks.

    These are its caveats, and the names of its phases and operations.
    """
    return traced.caveats, list(traced.phases), set(traced.operations)


def _extrapolate_work(before: StepWork, now: StepWork, steps: int) -> StepWork:
    """Extrapolate the work of a step (FLOPs, bytes and kernel launches) linearly to more repetitions of the blocks.

    Args:
        before: Work with one repetition less than `now`.
        now: Work to extrapolate from.
        steps: Number of repetitions to add to those of `now`.
    """
    pairs = ((getattr(before, field.name), getattr(now, field.name)) for field in fields(StepWork))
    return StepWork(*starmap(lambda less, more: more + steps * (more - less), pairs))


# ---------------------------------------------------------------- events without keys


def _get_kin(event: MemoryEvent) -> _Kin:
    return event.num_bytes, event.what, event.kind, event.stream


class _EventToken(NamedTuple):
    """Description of an allocation, a free or the start of a phase that can be compared between traces.

    The keys of events differ between traces, so a description contains no key.

    Attributes:
        event: Event with key 0, or None at the start of a phase.
        phase: Name of the phase that starts.
        kin: Bytes, operation, kind and stream of the memory that is freed. None unless the event is a free.
        newest: Position of the freed allocation among the allocations in use with equal `kin`, counted from the newest.
            None if the position differs between repetitions of the model's blocks.
        oldest: Position of the freed allocation among the allocations in use with equal `kin`, counted from the oldest.
            None if the position differs between repetitions of the model's blocks.
        growth: Bytes by which the allocation grows with each further repetition of the model's blocks. An example is a
            tensor with the norms of all gradients.
    """

    event: MemoryEvent | None
    phase: str = ""
    kin: _Kin | None = None
    newest: int | None = None
    oldest: int | None = None
    growth: int = 0


@pause_garbage_collection()
def _make_tokens(traced: Trace) -> list[_EventToken]:
    """Return descriptions of the events and phases of a trace. They contain no keys, so that traces can be compared."""
    begins: dict[int, list[str]] = defaultdict(list)
    for phase, index in traced.phases.items():
        begins[index].append(phase)
    in_use: dict[_Kin, list[int]] = defaultdict(list)
    kin_of: dict[int, _Kin] = {}
    found: list[_EventToken] = []
    for index, event in enumerate(traced.events):
        found += [_EventToken(None, phase) for phase in begins[index]]
        without = MemoryEvent(0, *event[1:])
        if event.num_bytes >= 0:
            kin_of[event.key] = kin = _get_kin(event)
            in_use[kin].append(event.key)
            found.append(_EventToken(without))
            continue
        kin = kin_of[event.key]
        place = in_use[kin].index(event.key)
        found.append(_EventToken(without, "", kin, len(in_use[kin]) - 1 - place, place))
        del in_use[kin][place]
    return found + [_EventToken(None, phase) for phase in begins[len(traced.events)]]


def _merge_tokens(one: _EventToken, other: _EventToken) -> _EventToken | None:
    """Return one description that fits two events, or None if the events differ.

    A freed allocation has two positions among equal allocations in use: one counted from the newest and one from the
    oldest. If only one position differs, it is None in the merged description. If both differ, the events differ.
    """
    if one[:3] != other[:3]:
        return None
    newest = one.newest if one.newest == other.newest else None
    oldest = one.oldest if one.oldest == other.oldest else None
    if one.kin is not None and newest is None and oldest is None:
        return None
    return one._replace(newest=newest, oldest=oldest)


def _merge_grown_token(one: _EventToken, other: _EventToken) -> _EventToken | None:
    """Return one description that fits two events which differ only in their bytes, or None if they differ in more.

    The result is also None for allocations of DDP buckets. Buckets have a maximum size, so their bytes do not grow by a
    constant amount.

    Args:
        one: Event description from a trace.
        other: Event description from the trace with one repetition more.
    """
    if one.event is None or other.event is None or one.event.kind == "buckets":
        return None
    size = other.event.num_bytes
    kin = one.kin and (-size, *one.kin[1:])
    merged = _merge_tokens(one._replace(event=MemoryEvent(0, size, *one.event[2:]), kin=kin), other)
    return merged and merged._replace(growth=size - one.event.num_bytes)


def _apply_size(known: _EventToken, other: _EventToken) -> _EventToken | None:
    """Return an event's description, with its bytes replaced by those of the same event at another batch size.

    Return None if the events differ in anything else: operation, kind of memory, or the position of the freed
    allocation.

    Args:
        known: Description that was verified with three traces of one batch.
        other: Description of the corresponding event in the trace of another batch.
    """
    if known.event is None or other.event is None:
        return known if (known.event, known.phase) == (other.event, other.phase) else None
    is_same = (
        (known.event.num_bytes < 0) == (other.event.num_bytes < 0)
        and (known.event.what, *known.event[4:]) == (other.event.what, *other.event[4:])
        and (known.kin and known.kin[1:]) == (other.kin and other.kin[1:])
        and (not known.growth or known.event.num_bytes == other.event.num_bytes)
    )
    # Sizes can be equal by chance at one batch size and not at another. Then only one of the two positions agrees.
    placed = _merge_tokens(other._replace(newest=known.newest, oldest=known.oldest), other) if is_same else None
    return placed and placed._replace(growth=known.growth)


class _EventRun(NamedTuple):
    """Consecutive event descriptions of a trace, and whether further repetitions of the model's blocks repeat them.

    Attributes:
        tokens: Event descriptions, in order.
        is_repeated: Whether each further repetition of the model's blocks adds the sequence once more.
    """

    tokens: list[_EventToken]
    is_repeated: bool = False


@pause_garbage_collection()
def _find_pieces(short: list[_EventToken], long: list[_EventToken]) -> list[_EventRun] | None:
    """Find the events that one more repetition of the blocks adds to a trace.

    Args:
        short: Event descriptions of a trace.
        long: Event descriptions of the trace with one repetition more.

    Returns:
        All events as a list of sequences, some of which are repeated. None if any added events do not repeat the events
        before them.
    """
    pieces: list[_EventRun] = []
    same: list[_EventToken] = []
    here = there = 0
    while there < len(long):
        merged = _merge_tokens(short[here], long[there]) if here < len(short) else None
        if merged is not None:
            same.append(merged)
            here, there = here + 1, there + 1
            continue
        added = _find_addition(short[here : here + _AHEAD], long, there)
        if added is None:
            merged = _merge_grown_token(short[here], long[there]) if here < len(short) else None
            if merged is None:
                return None
            same.append(merged)
            here, there = here + 1, there + 1
            continue
        pieces += [_EventRun(same), _EventRun(added, is_repeated=True)]
        same = []
        there += len(added)
    return [*pieces, _EventRun(same)] if here == len(short) else None


def _find_addition(ahead: list[_EventToken], long: list[_EventToken], begin: int) -> list[_EventToken] | None:
    """Return the events that one more repetition of the model's blocks adds to a trace at `begin`, or None if none.

    Added events must repeat the events before them. If sequences of several lengths do so, the one after which the most
    events match `ahead` is returned.

    Args:
        ahead: Next event descriptions of the trace with fewer repetitions.
        long: Event descriptions of the trace with one repetition more.
        begin: Index in `long`.
    """
    found: list[_EventToken] | None = None
    longest = 0
    for size in range(1, min(begin, len(long) - begin) + 1):
        follows = sum(1 for _ in takewhile(bool, map(_merge_tokens, ahead, long[begin + size : begin + size + _AHEAD])))
        if follows <= longest and found is not None:
            continue
        added = [token for token in map(_merge_tokens, long[begin - size : begin], long[begin : begin + size]) if token]
        if len(added) == size:
            found, longest = added, follows
    return found


@pause_garbage_collection()
def _expand_pieces(pieces: Iterable[_EventRun], times: int) -> _Expanded | None:
    """Build the events and phases of a trace from its sequences, with each repeated sequence `times` times in a row.

    Args:
        pieces: Event descriptions, split into sequences that are repeated and sequences that are not.
        times: Number of times that each repeated sequence occurs.

    Returns:
        The events, each with a key that pairs an allocation with its free, and the index of each phase's first event.
        None if a free has no matching allocation.
    """
    events: list[MemoryEvent] = []
    phases: dict[str, int] = {}
    in_use: dict[_Kin, list[int]] = defaultdict(list)
    next_key = 0
    for piece in pieces:
        for token in piece.tokens * (times if piece.is_repeated else 1):
            event = token.event
            if event is None:
                phases[token.phase] = len(events)
                continue
            # The description has the size with one added repetition, so growth counts from the second added one on.
            size = event.num_bytes + token.growth * (times - 1)
            _, what, kind, stream = token.kin or _get_kin(event)
            kin = in_use[abs(size), what, kind, stream]
            if token.kin is None:
                next_key += 1
                key = next_key
                kin.append(key)
            else:
                place = -1 - token.newest if token.newest is not None else token.oldest or 0
                if not -len(kin) <= place < len(kin):
                    return None
                key = kin.pop(place)
            events.append(MemoryEvent(key, size, *event[2:]))
    return events, phases
