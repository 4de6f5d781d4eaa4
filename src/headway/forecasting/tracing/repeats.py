"""Extrapolate a trace of a model with a few of its repeated blocks to the model with all blocks.

A model is traced with three, four and five of its repeated blocks. The events that the fourth block adds must repeat
the events before them. Adding them once more must give exactly the events with five blocks, and every free must match
its own allocation. If all of this is true, the events of the remaining blocks are added by further repetition.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
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
    candidates: list[tuple[int, RepeatedBlocks]] = []
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
                candidates.append((sum(1 for block in blocks[start:] for _ in block.modules()), repeated))
                break
    return max(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _describe_blocks(blocks: Sequence[nn.Module]) -> list[Any]:
    """Return a description of each block. Two blocks are treated as equal if their descriptions are equal.

    An attribute that equals the block's index in every block is left out.
    """
    all_parts = [{name: _describe_module(module) for name, module in block.named_modules()} for block in blocks]
    numbers = {
        (name, key)
        for name, first_module in all_parts[0].items()
        for key in first_module.attributes
        if all(name in parts and parts[name].attributes.get(key, -1) == index for index, parts in enumerate(all_parts))
    }
    return [
        {
            name: part._replace(
                attributes={key: value for key, value in part.attributes.items() if (name, key) not in numbers}
            )
            for name, part in parts.items()
        }
        for parts in all_parts
    ]


class _ModuleDescription(NamedTuple):
    """Properties of a module that must be equal in blocks that count as repetitions of each other.

    Attributes:
        module_type: Class of the module.
        attributes: Values of attributes with simple types, types of all other attributes, and numbers of hooks.
        tensors: Pairs of (name, description) of the parameters and buffers. A description is a tuple of shape, dtype
            and `requires_grad`, or None for a parameter or buffer that is None.
    """

    module_type: type
    attributes: dict[str, Any]
    tensors: list[tuple[str, Any]]


def _describe_module(module: nn.Module) -> _ModuleDescription:
    own = {**module._parameters, **module._buffers}
    tensors = [
        (name, each if each is None else (each.shape, each.dtype, each.requires_grad)) for name, each in own.items()
    ]
    values = {
        key: value if isinstance(value, bool | int | float | str | tuple | torch.dtype) else type(value)
        for key, value in vars(module).items()
    }
    hooks = {f"{key}()": len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
    return _ModuleDescription(type(module), values | hooks, tensors)


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
            extrapolated = proof.apply_to(second, count)
            if extrapolated is not None:
                return extrapolated
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
    num_added = count - TRACED - 1
    operations = {
        name: calls + num_added * (calls - first.operations.get(name, 0)) for name, calls in second.operations.items()
    }
    work = {phase: _extrapolate_work(first.work[phase], work, num_added) for phase, work in second.work.items()}
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
        tokens, begin = _make_tokens(traced), 0
        pieces: list[_EventRun] = []
        for piece in self.pieces:
            end = begin + len(piece.tokens)
            current = tokens[begin:end]
            sized = list(map(_apply_size, piece.tokens, current))
            if len(sized) < len(piece.tokens) or None in sized:
                return None
            previous = tokens[begin - len(sized) : begin]
            if piece.is_repeated and not all(map(_merge_tokens, previous, current)):
                return None
            pieces.append(_EventRun([token for token in sized if token], piece.is_repeated))
            begin = end
        if begin < len(tokens) or _expand_pieces(pieces, 1) != _expand_pieces([_EventRun(tokens)], 0):
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
    extrapolated: dict[str, Any] = {}
    for field in fields(StepWork):
        less, more = getattr(before, field.name), getattr(now, field.name)
        extrapolated[field.name] = more + steps * (more - less)
    return StepWork(**extrapolated)


# ---------------------------------------------------------------- events without keys


def _get_kin(event: MemoryEvent) -> _Kin:
    return event.num_bytes, event.operation, event.kind, event.stream


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
    tokens: list[_EventToken] = []
    for index, event in enumerate(traced.events):
        tokens += [_EventToken(None, phase) for phase in begins[index]]
        keyless = event._replace(key=0)
        if event.num_bytes >= 0:
            kin_of[event.key] = kin = _get_kin(event)
            in_use[kin].append(event.key)
            tokens.append(_EventToken(keyless))
            continue
        kin = kin_of[event.key]
        oldest = in_use[kin].index(event.key)
        newest = len(in_use[kin]) - 1 - oldest
        tokens.append(_EventToken(keyless, kin=kin, newest=newest, oldest=oldest))
        del in_use[kin][oldest]
    return tokens + [_EventToken(None, phase) for phase in begins[len(traced.events)]]


def _merge_tokens(one: _EventToken, other: _EventToken) -> _EventToken | None:
    """Return one description that fits two events, or None if the events differ.

    A freed allocation has two positions among equal allocations in use: one counted from the newest and one from the
    oldest. If only one position differs, it is None in the merged description. If both differ, the events differ.
    """
    if (one.event, one.phase, one.kin) != (other.event, other.phase, other.kin):
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
    merged = _merge_tokens(one._replace(event=one.event._replace(num_bytes=size), kin=kin), other)
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
        and _get_kin(known.event)[1:] == _get_kin(other.event)[1:]
        and (known.kin and known.kin[1:]) == (other.kin and other.kin[1:])
        and (not known.growth or known.event.num_bytes == other.event.num_bytes)
    )
    if not is_same:
        return None
    # Sizes can be equal by chance at one batch size and not at another. Then only one of the two positions agrees.
    merged = _merge_tokens(other._replace(newest=known.newest, oldest=known.oldest), other)
    return merged and merged._replace(growth=known.growth)


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
    common: list[_EventToken] = []
    short_index = long_index = 0
    while long_index < len(long):
        is_short_left = short_index < len(short)
        merged = _merge_tokens(short[short_index], long[long_index]) if is_short_left else None
        if merged is None:
            added = _find_addition(short[short_index : short_index + _AHEAD], long, long_index)
            if added is not None:
                pieces += [_EventRun(common), _EventRun(added, is_repeated=True)]
                common = []
                long_index += len(added)
                continue
            merged = _merge_grown_token(short[short_index], long[long_index]) if is_short_left else None
            if merged is None:
                return None
        common.append(merged)
        short_index, long_index = short_index + 1, long_index + 1
    return [*pieces, _EventRun(common)] if short_index == len(short) else None


def _find_addition(ahead: list[_EventToken], long: list[_EventToken], begin: int) -> list[_EventToken] | None:
    """Return the events that one more repetition of the model's blocks adds to a trace at `begin`, or None if none.

    Added events must repeat the events before them. If sequences of several lengths do so, the one after which the most
    events match `ahead` is returned.

    Args:
        ahead: Next event descriptions of the trace with fewer repetitions.
        long: Event descriptions of the trace with one repetition more.
        begin: Index in `long`.
    """
    best: list[_EventToken] | None = None
    most_matches = 0
    for size in range(1, min(begin, len(long) - begin) + 1):
        num_matches = sum(
            1 for _ in takewhile(bool, map(_merge_tokens, ahead, long[begin + size : begin + size + _AHEAD]))
        )
        if num_matches <= most_matches and best is not None:
            continue
        added = [token for token in map(_merge_tokens, long[begin - size : begin], long[begin : begin + size]) if token]
        if len(added) == size:
            best, most_matches = added, num_matches
    return best


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
            _, operation, kind, stream = token.kin or _get_kin(event)
            keys_in_use = in_use[abs(size), operation, kind, stream]
            if token.kin is None:
                next_key += 1
                key = next_key
                keys_in_use.append(key)
            else:
                position = -1 - token.newest if token.newest is not None else token.oldest or 0
                if not -len(keys_in_use) <= position < len(keys_in_use):
                    return None
                key = keys_in_use.pop(position)
            events.append(event._replace(key=key, num_bytes=size))
    return events, phases
