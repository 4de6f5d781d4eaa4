"""A plan: what each rank of a layout holds, sends and writes, in numbers and as text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from headway.common.text import columns, format_bytes, format_number
from headway.config.mesh import Layout
from headway.planning.dry_run.meter import MeteredCollective, PlanEvent, Volume
from headway.planning.dry_run.trial import RankGroups, StateOf, StepDryRun, TensorShare


@dataclass(frozen=True)
class RankShare:
    """What one rank holds between two updates, in bytes of memory.

    Attributes:
        rank: which.
        weights: parameters with their padding, and buffers.
        gradients: with padding.
        optimizer_state: of the elements that it holds.
        padding: bytes of the weights that are padding.
    """

    rank: int
    weights: int
    gradients: int
    optimizer_state: int
    padding: int

    @property
    def num_bytes(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class CheckpointSize:
    """A checkpoint of model and optimizer.

    Attributes:
        num_files: one for each rank that has something to write.
        num_bytes: of all files.
        per_rank: the most that one rank writes, where ranks that hold the same share the work.
    """

    num_files: int
    num_bytes: int
    per_rank: int


class RankShares:
    """What every rank holds.

    Args:
        layout: of the run.
        cut: the model's parameters.
        states: what the optimizer keeps, for each of them; none: nothing.
        buffers: bytes on each place along "pp".
        beside: bytes that each place along "pp" holds at its peak on top of that, which decides about the fullest rank.

    Attributes:
        num_empty: ranks that hold no element of any parameter that is cut.
        num_with_gaps: parameters of which some rank holds no element.
        thinnest: the parameter that the fewest ranks hold a part of, and how many do; None: all ranks hold a part of all.
        saved: a checkpoint, in which each element is once, whoever holds copies.
    """

    def __init__(
        self,
        layout: Layout,
        cut: Iterable[TensorShare],
        states: Iterable[StateOf],
        buffers: Sequence[int],
        beside: Sequence[int] = (),
    ) -> None:
        self._layout, self._ranks = layout, RankGroups(layout)
        zero = torch.zeros(layout.num_ranks, dtype=torch.long)
        self._beside = self._ranks.by_stage(beside) if beside else zero
        self._weights = self._ranks.by_stage(buffers)
        self._gradients, self._state, self._padding = zero + 0, zero + 0, zero + 0
        held_any, written = zero.bool(), zero.double()
        gaps: list[tuple[int, str]] = []
        cut = list(cut)
        states = list(states) or [StateOf(0, 0)] * len(cut)
        for piece, state in zip(cut, states):
            held, stored = self._ranks.elements(piece)
            self._weights += stored * piece.itemsize
            self._padding += (stored - held) * piece.itemsize
            if piece.learns:
                self._gradients += stored * piece.itemsize
            is_there = 1 if piece.stages is None else self._ranks.is_on(piece.stages)
            self._state += held * state.per_element + state.fixed * is_there
            written += self._written(piece, held * (piece.itemsize + state.per_element))
            num_holders = int((held > 0).sum())
            held_any |= held > 0
            if num_holders < layout.num_ranks and piece.stages is None:
                gaps.append((num_holders, piece.name))
        self.num_empty = int((~held_any).sum())
        self.num_with_gaps = len(gaps)
        self.thinnest = min(gaps) if gaps else None
        self.saved = CheckpointSize(int((written > 0).sum()), round(float(written.sum())), round(float(written.max())))

    def _written(self, piece: TensorShare, num_bytes: torch.Tensor) -> torch.Tensor:
        """What each rank writes of the bytes that it has of a parameter: (num_ranks,)."""
        layout = self._layout
        if (
            piece.stages is not None and len(piece.stages) < layout.pp
        ):  # the first rank that holds it, or a part, writes it
            writes = self._ranks.is_on(frozenset((min(piece.stages),)))
            for axis in layout.sizes.keys() - {"pp", *piece.axes}:
                writes = writes & (self._ranks.coordinates[axis] == 0)
            return num_bytes * writes
        return num_bytes / prod(size for axis, size in layout.sizes.items() if axis not in piece.axes)

    def of(self, rank: int) -> RankShare:
        """What that rank holds."""
        columns = self._weights, self._gradients, self._state, self._padding
        return RankShare(rank, *(int(column[rank]) for column in columns))

    def fullest(self) -> RankShare:
        """Of the rank that holds most; the first of them."""
        return self.of(int((self._weights + self._gradients + self._state + self._beside).argmax()))


@dataclass(frozen=True)
class Stage:
    """What the ranks at one place along a pipeline do.

    Attributes:
        share: what the first of them holds.
        activations: the most bytes that autograd keeps there, of the micro-batches under way; None: no step was given.
        exchanges: what it sends in one update.
        flops: in one update.
        events: what it does, in order.
    """

    share: RankShare
    activations: int | None
    exchanges: dict[MeteredCollective, Volume]
    flops: int
    events: tuple[PlanEvent, ...]

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in one update."""
        return bytes_sent(self.exchanges)


def bytes_sent(exchanges: dict[MeteredCollective, Volume]) -> float:
    """By one rank."""
    return sum(exchange.sent(volume.num_bytes) for exchange, volume in exchanges.items())


@dataclass(frozen=True)
class Plan:
    """One layout of a run.

    Attributes:
        strategy: as it was asked for.
        layout: on so many ranks.
        num_parameters: of the whole model.
        shares: what every rank holds.
        exchanges: what a rank sends in one update; None: no step was given.
        flops: of one rank in one update; None: no step was given.
        activations: bytes that autograd keeps from forward to backward, without temporaries; None: no step was given.
        gathered: an estimate of the bytes that gathered parameters and gradients on their way take at most.
        tokens: of one data shard in one update; 0: not known.
        stages: by their places along "pp"; then `exchanges` are those of the rank that sends most, `flops` those of the rank that
            computes most, and `activations` those of the rank that needs most memory. Empty: no pipeline.
        traced: bytes that tensors took at most on rank 0, or on the rank of a pipeline that takes most, with temporaries; None: no
            step was given.
    """

    strategy: str
    layout: Layout
    num_parameters: int
    shares: RankShares
    exchanges: dict[MeteredCollective, Volume] | None
    flops: int | None
    activations: int | None
    gathered: int
    tokens: int = 0
    stages: tuple[Stage, ...] = ()
    traced: int | None = None

    @property
    def num_ranks(self) -> int:
        """Of the run."""
        return self.layout.num_ranks

    @property
    def rank0(self) -> RankShare:
        """What rank 0 holds."""
        return self.shares.of(0)

    @property
    def last_rank(self) -> RankShare:
        """What the rank of the highest number holds: the emptiest one."""
        return self.shares.of(self.num_ranks - 1)

    @property
    def saved(self) -> CheckpointSize:
        """What a checkpoint takes."""
        return self.shares.saved

    @property
    def peak(self) -> int:
        """Bytes that tensors take at most on a rank, as they were traced; without a step what is counted."""
        return self.total if self.traced is None else self.traced

    @property
    def total(self) -> int:
        """Bytes of the fullest rank with what comes and goes in an update, each at its largest, without temporaries."""
        return self.shares.fullest().num_bytes + self.gathered + (self.activations or 0)

    def sent(self) -> dict[tuple[str, str], int]:
        """{(axis, collective): bytes that a rank sends in one update, if collectives are rings}."""
        found: Counter[tuple[str, str]] = Counter()
        for exchange, volume in (self.exchanges or {}).items():
            found[exchange.axis, exchange.kind] += round(exchange.sent(volume.num_bytes))
        return dict(found)

    def __str__(self) -> str:
        return "\n".join(describe(self))


def outcome(strategy: str, layout: Layout, trials: Sequence[StepDryRun], tokens: int) -> Plan:
    """What follows for all ranks from what some of them did.

    Args:
        strategy: as it was asked for.
        layout: of the run.
        trials: by place along "pp", those of the first replica; without a pipeline that of rank 0.
        tokens: of one data shard in one update; 0: not known.
    """
    cut, states = _joined(layout, trials)
    beside = [trial.activations or 0 for trial in trials]
    shares = RankShares(layout, cut, states, [trial.buffers for trial in trials], beside)
    is_pipeline, has_step = layout.pp > 1, trials[0].volumes is not None
    stages = tuple(
        Stage(shares.of(rank), trial.activations, trial.volumes or {}, sum((trial.flops or {}).values()), trial.events)
        for rank, trial in zip(layout.groups("pp")[0], trials)
    )
    fullest = max(stages, key=lambda stage: stage.share.num_bytes + (stage.activations or 0))
    return Plan(
        strategy,
        layout,
        sum(prod(piece.shape) for piece in cut),
        shares,
        max(stages, key=lambda stage: stage.sent).exchanges if has_step else None,
        max(stage.flops for stage in stages) if has_step else None,
        fullest.activations,
        max(_gathered(stage.exchanges, is_pipeline) for stage in stages),
        tokens,
        stages if is_pipeline else (),
        max(trial.peak or 0 for trial in trials) if has_step else None,
    )


def _joined(layout: Layout, trials: Sequence[StepDryRun]) -> tuple[tuple[TensorShare, ...], tuple[StateOf, ...]]:
    """The parameters of all places, with those that hold them, and what the optimizer keeps for each."""
    on: dict[str, set[int]] = {}
    found: dict[str, tuple[TensorShare, StateOf | None]] = {}
    for place, trial in enumerate(trials):
        for index, piece in enumerate(trial.pieces):
            on.setdefault(piece.name, set()).add(place)
            found.setdefault(piece.name, (piece, trial.states[index] if trial.states else None))
    pieces = tuple(
        replace(piece, stages=None if layout.pp == 1 else frozenset(on[name])) for name, (piece, _) in found.items()
    )
    return pieces, tuple(state for _, state in found.values() if state is not None)


def _gathered(volumes: dict[MeteredCollective, Volume], is_pipeline: bool) -> int:
    """What lies gathered at once: the unit that computes, the one fetched ahead, and the root, which stays; gradients of one unit.

    Of a pipeline all parameters of a stage, and their gradients.
    """
    sharded = [(exchange.kind, volume) for exchange, volume in volumes.items() if "shard" in exchange.axis]
    gathers = [volume for kind, volume in sharded if kind == "all_gather"]
    if is_pipeline or not gathers:
        return 2 * sum(volume.num_bytes for volume in gathers)
    largest = [volume.largest for volume in gathers]
    reductions = (volume.largest for kind, volume in sharded if kind == "reduce_scatter")
    return max(largest) + 2 * min(largest) + max(reductions, default=0)


@dataclass(frozen=True)
class Cost:
    """What an update takes at least.

    Attributes:
        compute: seconds of computing.
        by_axis: seconds of exchanges along each axis.
        seconds: of the update, where all that can overlap does.
        bottleneck: "compute", the axis that takes longest, or "bubble".
        tokens_per_second: of the whole run; 0: the tokens of an update are not known.
        per_unit: rank-seconds for a token, or for one batch of a data shard: what layouts are compared by.
        bubble: seconds for which the rank of a pipeline that computes most waits for the others.
    """

    compute: float
    by_axis: dict[str, float]
    seconds: float
    bottleneck: str
    tokens_per_second: float
    per_unit: float
    bubble: float = 0.0


NOT_COUNTED = "not counted"


def describe(plan: Plan, found: Cost | None = None) -> list[str]:
    """One layout in full."""
    sizes = " x ".join(f"{size} {axis}" for axis, size in plan.layout.sizes.items()) or "one process"
    lines = [
        f"{plan.strategy} on {plan.num_ranks:,} ranks ({sizes}): {plan.num_parameters:,} parameters",
        *columns([["rank", "weights", "of which padding", "gradients", "optimizer state", "total"], *_ranks(plan)]),
        *_gaps(plan),
        *_stages(plan),
        f"activations kept for backward, without temporaries: {counted(plan.activations)}",
        f"gathered parameters and their gradients, estimated: {counted(plan.gathered if plan.exchanges is not None else None)}",
        f"a checkpoint: {plan.saved.num_files:,} file(s), {format_bytes(plan.saved.num_bytes)}, of which each rank writes at most "
        f"{format_bytes(plan.saved.per_rank)}",
        f"the most that tensors take at once, with temporaries: {counted(plan.traced)}",
    ]
    if plan.exchanges is None:
        return [*lines, "communication and FLOPs: not counted, because there is no step to run"]
    if plan.exchanges:
        head = ["phase", "collective", "axis", "ranks", "calls", "bytes", "sent per rank"]
        lines += ["one update sends:", *columns([head, *_exchanges(plan)])]
    else:
        lines.append("one update sends nothing")
    lines.append(f"one update computes {format_number((plan.flops or 0) / 1e12)} TFLOP per rank")
    if found is not None:
        parts = [
            f"computing {in_seconds(found.compute)}",
            *(f"{axis} {in_seconds(s)}" for axis, s in found.by_axis.items()),
            *([f"waiting for other stages {in_seconds(found.bubble)}"] if plan.stages else []),
        ]
        lines.append(f"at least {in_seconds(found.seconds)} ({', '.join(parts)}); it waits for {found.bottleneck}")
    return lines


def _ranks(plan: Plan) -> Iterable[list[str]]:
    shares = {share.rank: share for share in (plan.rank0, plan.shares.fullest(), plan.last_rank)}
    for rank, share in sorted(shares.items()):
        sizes = share.weights, share.padding, share.gradients, share.optimizer_state, share.num_bytes
        yield [f"{rank:,}", *map(format_bytes, sizes)]


def _stages(plan: Plan) -> list[str]:
    if not plan.stages:
        return []
    head = ["stage", "rank", "held", "activations", "total", "sent", "TFLOP"]
    rows = [
        [
            f"{place}",
            f"{stage.share.rank:,}",
            format_bytes(stage.share.num_bytes),
            counted(stage.activations),
            format_bytes(stage.share.num_bytes + (stage.activations or 0)),
            NOT_COUNTED if plan.exchanges is None else format_bytes(stage.sent),
            NOT_COUNTED if plan.exchanges is None else format_number(stage.flops / 1e12),
        ]
        for place, stage in enumerate(plan.stages)
    ]
    return [
        "by place along the pipeline, where the last lines show the rank that has most of each:",
        *columns([head, *rows]),
    ]


def _gaps(plan: Plan) -> Iterable[str]:
    if plan.shares.thinnest is None:
        return
    num_holders, name = plan.shares.thinnest
    yield (
        f"{plan.shares.num_with_gaps:,} parameters have fewer rows than there are ranks; only {num_holders:,} ranks hold a "
        f"part of {name}, and {plan.shares.num_empty:,} ranks hold no part of any parameter"
    )


def _exchanges(plan: Plan) -> Iterable[list[str]]:
    for exchange, volume in (plan.exchanges or {}).items():
        sizes = format_bytes(volume.num_bytes), format_bytes(exchange.sent(volume.num_bytes))
        yield [exchange.phase, exchange.kind, exchange.axis, f"{exchange.num_ranks:,}", f"{volume.calls:,}", *sizes]


def counted(size: float | None) -> str:
    """A size for people; None: it was not counted."""
    return NOT_COUNTED if size is None else format_bytes(size)


def in_seconds(value: float) -> str:
    """A duration for people, to three digits."""
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1000)} ms"
