"""What follows from a trace without tracing it: the blocks of a model that repeat, and a third update after two.

A model with three, four and five of its blocks is traced. What the fourth adds to the events must repeat what comes before it, and
repeating it once more must give the events with five, each free of its own memory included. Then repeating it gives those of all.

Blocks of memory are placed differently after each of the first few updates, and reserved memory grows: the third is the second again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import starmap, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.common.garbage import no_garbage_search
from headway.errors import HeadwayError
from headway.forecasting.device.allocator import MemoryEvent
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.work import StepWork

FEWEST = 16
"""Repetitions from which on twelve that are traced are worth it."""
TRACED = 3
"""The fewest that are traced; one and two more are, too."""
_AHEAD = 24
"""Events that must be alike after a place at which others were put in."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """A list of blocks that repeat to its end.

    Attributes:
        path: of the list in the model.
        length: blocks.
        period: blocks after which they repeat.
        start: the first from which on they do.
    """

    path: str
    length: int
    period: int
    start: int

    @property
    def count(self) -> int:
        """Repetitions."""
        return (self.length - self.start) // self.period

    def shorten(self, model: nn.Module, count: int) -> None:
        """Leave so many repetitions in the model."""
        blocks: Any = model.get_submodule(self.path)
        del blocks[self.length - (self.count - count) * self.period :]

    def first_alike(self, name: str) -> str:
        """The name of what is alike in the first repetition, of a parameter in any of them; another name as it is."""
        prefix = f"{self.path}." if self.path else ""
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not index.isdecimal() or int(index) < self.start:
            return name
        return f"{prefix}{self.start + (int(index) - self.start) % self.period}{dot}{rest}"


def find_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """The list of blocks with the most modules in its repetitions; None where none is long enough."""
    found: list[tuple[int, RepeatedBlocks]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < FEWEST:
            continue
        blocks = list(module)
        descriptions = _describe(blocks)
        for period in range(1, len(blocks) // FEWEST + 1):
            start = len(blocks) - period
            while start > 0 and descriptions[start - 1] == descriptions[start - 1 + period]:
                start -= 1
            repeated = RepeatedBlocks(path, len(blocks), period, start)
            if repeated.count >= FEWEST:
                found.append((sum(1 for block in blocks[start:] for _ in block.modules()), repeated))
                break
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _describe(blocks: Sequence[nn.Module]) -> list[Any]:
    """What blocks have to have in common to compute alike; their own numbers in the list are left out."""
    all_parts = [{name: _part(module) for name, module in block.named_modules()} for block in blocks]
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


def _part(module: nn.Module) -> tuple[type, dict[str, Any], list[Any]]:
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
    """The trace of a model with many repetitions from those with a few; None where these do not prove to be alike.

    Args:
        trace: traces the model with so many repetitions.
        count: of the model.
        proofs: of the same model with other batches: one trace whose events come in the same order is then enough. A new one is
            added.
    """
    proofs = [] if proofs is None else proofs
    try:
        second = trace(TRACED + 1)
        for proof in proofs:
            found = proof.applied(second, count)
            if found is not None:
                return found
        first = trace(TRACED)
        pieces = _grown(_tokens(first), _tokens(second))
        if pieces is None:
            return None
        third = trace(TRACED + 2)
    except HeadwayError:  # such a model cannot be called with fewer blocks than it expects
        return None
    if _summary(first) != _summary(third) or _expanded(pieces, 2) != _expanded([_Piece(_tokens(third))], 0):
        return None
    proofs.append(RepeatProof(pieces, first, second))
    return _carried_on(pieces, first, second, count)


def _carried_on(pieces: "list[_Piece]", first: Trace, second: Trace, count: int) -> Trace | None:
    expanded = _expanded(pieces, count - TRACED)
    if expanded is None:
        return None
    events, phases = expanded
    ahead = count - TRACED - 1
    operations = {
        name: times + ahead * (times - first.operations.get(name, 0)) for name, times in second.operations.items()
    }
    work = {phase: _ahead(first.work[phase], done, ahead) for phase, done in second.work.items()}
    return replace(second, events=events, phases=phases, operations=operations, work=work)


@dataclass(frozen=True)
class RepeatProof:
    """Where one more repetition puts in events, as three traces of a batch have shown.

    Attributes:
        pieces: of the events.
        first, second: the traces with `TRACED` repetitions and with one more.
    """

    pieces: "list[_Piece]"
    first: Trace
    second: Trace

    def applied(self, traced: Trace, count: int) -> Trace | None:
        """The trace of another batch with `count` repetitions, from that with one more than `TRACED`.

        None where it is unlike that of the proof in more than the bytes of its events, where what was put in does not repeat what is
        before it, and where work was counted, which may grow otherwise with another batch.
        """
        if traced.work or _summary(traced) != _summary(self.second) or traced.operations != self.second.operations:
            return None
        tokens, here = _tokens(traced), 0
        pieces: list[_Piece] = []
        for piece in self.pieces:
            end = here + len(piece.tokens)
            sized = list(map(_sized, piece.tokens, tokens[here:end]))
            repeats = not piece.is_repeated or all(map(_merged, tokens[here - len(sized) : here], tokens[here:end]))
            if len(sized) < len(piece.tokens) or None in sized or not repeats:
                return None
            pieces.append(_Piece([token for token in sized if token], piece.is_repeated))
            here = end
        if here < len(tokens) or _expanded(pieces, 1) != _expanded([_Piece(tokens)], 0):
            return None
        return _carried_on(pieces, self.first, traced, count)


def _summary(traced: Trace) -> Any:
    return traced.caveats, list(traced.phases), set(traced.operations)


def _ahead(before: StepWork, now: StepWork, steps: int) -> StepWork:
    pairs = ((getattr(before, field.name), getattr(now, field.name)) for field in fields(StepWork))
    return StepWork(*starmap(lambda less, more: more + steps * (more - less), pairs))


# ---------------------------------------------------------------- events without keys


_Kin = tuple[int, str, str, int]


def _kin(event: MemoryEvent) -> _Kin:
    return event.num_bytes, event.what, event.kind, event.stream


class _Token(NamedTuple):
    """An event, or the beginning of a phase, said without a key.

    Attributes:
        event: with key 0; None: a phase begins.
        phase: its name.
        kin: bytes, operation, kind and stream of the memory that is given back.
        newest, oldest: its place among all kin in use, from either end; None: it differs between repetitions.
        growth: bytes that another repetition adds to it, as to the norms of all gradients side by side.
    """

    event: MemoryEvent | None
    phase: str = ""
    kin: _Kin | None = None
    newest: int | None = None
    oldest: int | None = None
    growth: int = 0


@no_garbage_search()
def _tokens(traced: Trace) -> list[_Token]:
    begins: dict[int, list[str]] = defaultdict(list)
    for phase, index in traced.phases.items():
        begins[index].append(phase)
    in_use: dict[_Kin, list[int]] = defaultdict(list)
    kin_of: dict[int, _Kin] = {}
    found: list[_Token] = []
    for index, event in enumerate(traced.events):
        found += [_Token(None, phase) for phase in begins[index]]
        without = MemoryEvent(0, *event[1:])
        if event.num_bytes >= 0:
            kin_of[event.key] = kin = _kin(event)
            in_use[kin].append(event.key)
            found.append(_Token(without))
            continue
        kin = kin_of[event.key]
        place = in_use[kin].index(event.key)
        found.append(_Token(without, "", kin, len(in_use[kin]) - 1 - place, place))
        del in_use[kin][place]
    return found + [_Token(None, phase) for phase in begins[len(traced.events)]]


def _merged(one: _Token, other: _Token) -> _Token | None:
    """What both are; None where they differ."""
    if one[:3] != other[:3]:
        return None
    newest = one.newest if one.newest == other.newest else None
    oldest = one.oldest if one.oldest == other.oldest else None
    if one.kin is not None and newest is None and oldest is None:
        return None
    return one._replace(newest=newest, oldest=oldest)


def _grown_token(one: _Token, other: _Token) -> _Token | None:
    """What both are but for its bytes; None where they differ otherwise, or in what is cut by its size."""
    if one.event is None or other.event is None or one.event.kind == "buckets":
        return None
    size = other.event.num_bytes
    kin = one.kin and (-size, *one.kin[1:])
    merged = _merged(one._replace(event=MemoryEvent(0, size, *one.event[2:]), kin=kin), other)
    return merged and merged._replace(growth=size - one.event.num_bytes)


def _sized(known: _Token, other: _Token) -> _Token | None:
    """The event of another batch, with the place that both have; None where it is another event, or has another place."""
    if known.event is None or other.event is None:
        return known if (known.event, known.phase) == (other.event, other.phase) else None
    is_same = (
        (known.event.num_bytes < 0) == (other.event.num_bytes < 0)
        and (known.event.what, *known.event[4:]) == (other.event.what, *other.event[4:])
        and (known.kin and known.kin[1:]) == (other.kin and other.kin[1:])
        and (not known.growth or known.event.num_bytes == other.event.num_bytes)
    )
    # Where sizes are alike by chance, as they are at one batch and not at another, only one of the two places agrees.
    placed = _merged(other._replace(newest=known.newest, oldest=known.oldest), other) if is_same else None
    return placed and placed._replace(growth=known.growth)


class _Piece(NamedTuple):
    """Tokens, and whether another repetition adds them again."""

    tokens: list[_Token]
    is_repeated: bool = False


@no_garbage_search()
def _grown(short: list[_Token], long: list[_Token]) -> list[_Piece] | None:
    """Where one more repetition has put in tokens, each time a repetition of those before; None where it has done something else."""
    pieces: list[_Piece] = []
    same: list[_Token] = []
    here = there = 0
    while there < len(long):
        merged = _merged(short[here], long[there]) if here < len(short) else None
        if merged is not None:
            same.append(merged)
            here, there = here + 1, there + 1
            continue
        added = _added(short[here : here + _AHEAD], long, there)
        if added is None:
            merged = _grown_token(short[here], long[there]) if here < len(short) else None
            if merged is None:
                return None
            same.append(merged)
            here, there = here + 1, there + 1
            continue
        pieces += [_Piece(same), _Piece(added, is_repeated=True)]
        same = []
        there += len(added)
    return [*pieces, _Piece(same)] if here == len(short) else None


def _added(ahead: list[_Token], long: list[_Token], begin: int) -> list[_Token] | None:
    """What was put in from `begin` on: it repeats what is before it, and as much as can be of what is ahead follows it."""
    found: list[_Token] | None = None
    longest = 0
    for size in range(1, min(begin, len(long) - begin) + 1):
        follows = sum(1 for _ in takewhile(bool, map(_merged, ahead, long[begin + size : begin + size + _AHEAD])))
        if follows <= longest and found is not None:
            continue
        added = [token for token in map(_merged, long[begin - size : begin], long[begin : begin + size]) if token]
        if len(added) == size:
            found, longest = added, follows
    return found


_Expanded = tuple[list[MemoryEvent], dict[str, int]]


@no_garbage_search()
def _expanded(pieces: Iterable[_Piece], times: int) -> _Expanded | None:
    """Events with keys, and the phases' beginnings, where what is repeated comes so many times; None where that cannot be."""
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
            # The sizes of tokens are those with the first repetition.
            size = event.num_bytes + token.growth * (times - 1)
            _, what, kind, stream = token.kin or _kin(event)
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


# ---------------------------------------------------------------- a third update


_LAST, _END = "step 2 forward", "end"


def _kept(left: list[MemoryEvent], second: list[MemoryEvent]) -> list[MemoryEvent] | None:
    """What the second update asks for and holds beyond its end, as the first has done; None where that is something else.

    When a traced loop ends its variables go, too: what is given back last of all may have been kept.
    """
    last = len(second)
    while last and second[last - 1].num_bytes < 0:
        last -= 1
    gone = {event.key for event in second[:last] if event.num_bytes < 0}
    at_end = {event.key for event in second[last:]}
    kept: list[MemoryEvent] = []
    for event in second:
        if event.num_bytes < 0 or event.key in gone:
            continue
        wanted = left[len(kept)] if len(kept) < len(left) else None
        if wanted is not None and (wanted[1:3], wanted[4:]) == (event[1:3], event[4:]):
            kept.append(event)
        elif event.key not in at_end:
            return None
    return kept if len(kept) == len(left) else None


def with_third_update(traced: Trace) -> Trace:
    """The trace of two updates with a third, whose events are the second's.

    What the second gives back of the first's, such as a loop's old outputs, the third gives back of the second's. Where what the two
    leave behind differs, the trace stays as it is.
    """
    begin, end = traced.phases.get(_LAST), traced.phases.get(_END, 0)
    first = traced.phases.get("step 1 forward")
    if begin is None or first is None or not end or "step 3 forward" in traced.phases:
        return traced
    before, second, beyond = traced.events[first:begin], traced.events[begin:end], traced.events[end:]
    given_back = {event.key for event in second if event.num_bytes < 0}
    left = [event for event in before if event.num_bytes > 0 and event.key in given_back]
    kept = _kept(left, second)
    if kept is None:
        return traced
    next_key = max(event.key for event in traced.events) + 1
    keys = {event.key: next_key + i for i, event in enumerate(second) if event.num_bytes > 0}
    keys |= {old.key: new.key for old, new in zip(left, kept)}
    if not given_back <= keys.keys():
        return traced
    stays = {event.key for event in kept}
    now = [event for event in second if event.num_bytes > 0 or event.key not in stays]
    third = [MemoryEvent(keys[event.key], *event[1:]) for event in second]
    end -= len(second) - len(now)
    phases = {
        name.replace("step 2", "step 3"): index - begin + end
        for name, index in traced.phases.items()
        if name.startswith("step 2")
    }
    ended = {name: index for name, index in traced.phases.items() if name != _END}
    events = [*traced.events[:begin], *now, *third, *beyond]
    return replace(traced, events=events, phases={**ended, **phases, _END: end + len(third)})
