"""Combine dry runs into a plan: the memory, communication and checkpoint size of each rank, as numbers and as text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from headway.common.text import format_bytes, format_columns, format_number
from headway.core.config.mesh import Layout
from headway.planning.dry_run.meter import MeteredCollective, PlanEvent, Volume
from headway.planning.dry_run.states import StateBytes
from headway.planning.dry_run.trial import RankCoordinates, StepDryRun, TensorSharding

NOT_COUNTED = "not counted"
"""Text in place of a number that was not counted."""


@dataclass(frozen=True)
class RankShare:
    """Memory of one rank that does not depend on the batch, in bytes.

    Attributes:
        rank: Number of the rank.
        weights: Parameters with their padding, and buffers.
        gradients: Gradients with their padding.
        optimizer_state: Optimizer state of the elements on this rank.
        padding: Padding that is included in `weights`.
    """

    rank: int
    weights: int
    gradients: int
    optimizer_state: int
    padding: int

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class CheckpointSize:
    """Size of a checkpoint of the model and the optimizer.

    Attributes:
        num_files: Number of files, one for each rank that writes data.
        num_bytes: Bytes of all files.
        per_rank: Maximum number of bytes that one rank writes. Ranks that have the same data write equal parts of it.
    """

    num_files: int
    num_bytes: int
    per_rank: int


class RankShares:
    """Memory of every rank of a layout.

    Args:
        layout: Layout of the run.
        parameters: Parameters of the model, and how they are sharded.
        states: Optimizer state of each parameter, in the order of `parameters`. Empty without an optimizer.
        buffers: Bytes of buffers at each pipeline stage.
        at_peak: Additional bytes that each pipeline stage needs at its peak, such as activations. They are not part of
            any rank's `RankShare`, and only serve to determine which rank needs the most memory. Empty: none.

    Attributes:
        num_empty: Number of ranks that have no element of any parameter.
        num_with_gaps: Number of parameters that have no element on at least one rank. Parameters that only some
            pipeline stages have are not counted.
        thinnest: Of the parameters that `num_with_gaps` counts, the one on the fewest ranks: a tuple of (number of
            ranks, name). None if there are none.
        saved: Size of a checkpoint, which contains each element once.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[TensorSharding],
        states: Iterable[StateBytes],
        buffers: Sequence[int],
        at_peak: Sequence[int] = (),
    ) -> None:
        self._layout = layout
        self._ranks = RankCoordinates(layout)
        zero = torch.zeros(layout.num_ranks, dtype=torch.long)
        self._at_peak = self._ranks.spread_by_stage(at_peak) if at_peak else zero
        self._weights = self._ranks.spread_by_stage(buffers)
        self._gradients = zero + 0
        self._state = zero + 0
        self._padding = zero + 0
        has_any, written = zero.bool(), zero.double()
        gaps: list[tuple[int, str]] = []
        for parameter, state in zip(parameters, list(states) or [StateBytes(0, 0)] * len(parameters)):
            num_elements, num_allocated = self._ranks.count_elements(parameter)
            self._weights += num_allocated * parameter.itemsize
            self._padding += (num_allocated - num_elements) * parameter.itemsize
            if parameter.requires_grad:
                self._gradients += num_allocated * parameter.itemsize
            if state.owner is None:
                has_stage = 1 if parameter.stages is None else self._ranks.mask_stages(parameter.stages)
                self._state += num_elements * state.per_element + state.fixed * has_stage
                written += self._count_written(parameter, num_elements * (parameter.itemsize + state.per_element))
            else:
                owned_bytes = prod(parameter.shape) * state.per_element + state.fixed
                self._state[state.owner] += owned_bytes
                written += self._count_written(parameter, num_elements * parameter.itemsize)
                written[state.owner] += owned_bytes
            has_any |= num_elements > 0
            num_ranks = int((num_elements > 0).sum())
            if num_ranks < layout.num_ranks and parameter.stages is None:
                gaps.append((num_ranks, parameter.name))
        self.num_empty = int((~has_any).sum())
        self.num_with_gaps = len(gaps)
        self.thinnest = min(gaps) if gaps else None
        self.saved = CheckpointSize(int((written > 0).sum()), round(float(written.sum())), round(float(written.max())))

    def _count_written(self, parameter: TensorSharding, num_bytes: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a parameter that each rank writes to a checkpoint, as a tensor of shape (num_ranks,).

        Args:
            parameter: Description of the parameter.
            num_bytes: Bytes of the parameter, and of its optimizer state if each rank has that of its shard, on each
                rank.
        """
        layout = self._layout
        if parameter.stages is not None and len(parameter.stages) < layout.pp:
            # The first rank that has the parameter, or a shard of it, writes it.
            writes = self._ranks.mask_stages(frozenset((min(parameter.stages),)))
            for axis in layout.sizes.keys() - {"pp", *parameter.axes}:
                writes = writes & (self._ranks.coordinates[axis] == 0)
            return num_bytes * writes
        # Ranks with equal shards write equal parts.
        return num_bytes / prod(size for axis, size in layout.sizes.items() if axis not in parameter.axes)

    def get_share(self, rank: int) -> RankShare:
        """Return the memory of the rank with this number."""
        return RankShare(
            rank=rank,
            weights=int(self._weights[rank]),
            gradients=int(self._gradients[rank]),
            optimizer_state=int(self._state[rank]),
            padding=int(self._padding[rank]),
        )

    def find_fullest(self) -> RankShare:
        """Return the memory of the rank that needs the most, including `at_peak`. Of equal ranks, the first is used."""
        return self.get_share(int((self._weights + self._gradients + self._state + self._at_peak).argmax()))


@dataclass(frozen=True)
class Stage:
    """Plan for the ranks at one stage of a pipeline.

    Attributes:
        share: Memory of the first rank of the stage.
        activations: Peak bytes that autograd keeps for the micro-batches in progress, or None if no step was planned.
        exchanges: Number of calls and bytes of each kind of collective in one update, as on the stage's first rank.
        flops: Floating point operations of one update.
        events: Computation and communication in order.
    """

    share: RankShare
    activations: int | None
    exchanges: dict[MeteredCollective, Volume]
    flops: int
    events: tuple[PlanEvent, ...]

    @property
    def sent(self) -> float:
        """Bytes that the first rank of the stage sends in one update."""
        return count_bytes_sent(self.exchanges)


def count_bytes_sent(exchanges: dict[MeteredCollective, Volume]) -> float:
    """Return the bytes that one rank sends in all of the given collectives."""
    return sum(exchange.count_sent_bytes(volume.num_bytes) for exchange, volume in exchanges.items())


@dataclass(frozen=True)
class Plan:
    """Plan of one layout of a run.

    Attributes:
        strategy: Name of the layout as the user gave it.
        layout: Layout with the sizes of its axes.
        num_parameters: Number of parameters of the whole model.
        shares: Memory of every rank.
        exchanges: Number of calls and bytes of each kind of collective on a rank in one update. None if no step was
            planned. For a pipeline, those of the rank that sends the most.
        flops: Floating point operations of a rank in one update, or None if no step was planned. For a pipeline, those
            of the rank that computes the most.
        activations: Bytes that autograd keeps from forward to backward, without temporaries. None if no step was
            planned. For a pipeline, the bytes on the rank that needs the most memory.
        gathered: Estimated peak bytes of gathered parameters and of gradients in transit.
        tokens: Tokens of one data shard in one update, or 0 if unknown.
        stages: Plans by stage, or empty without a pipeline.
        traced: Traced peak bytes of tensors, including temporaries, on rank 0. If single ranks update full parameters
            for all others, those of the rank that needs the most memory for updates. For a pipeline, those of the rank
            with the highest peak. None if no step was planned.
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
        """World size."""
        return self.layout.num_ranks

    @property
    def rank0(self) -> RankShare:
        """Memory of rank 0."""
        return self.shares.get_share(0)

    @property
    def last_rank(self) -> RankShare:
        """Memory of the last rank. In its pipeline stage, uneven sharding gives this rank the smallest shards."""
        return self.shares.get_share(self.num_ranks - 1)

    @property
    def saved(self) -> CheckpointSize:
        """Size of a checkpoint."""
        return self.shares.saved

    @property
    def peak(self) -> int:
        """Peak bytes of tensors on a rank, including temporaries, as traced.

        Without a trace, it is `total`, which does not include temporaries.
        """
        return self.total if self.traced is None else self.traced

    @property
    def total(self) -> int:
        """Bytes on the rank that needs the most memory, including gathered parameters and activations.

        Temporaries are not included.
        """
        return self.shares.find_fullest().num_bytes + self.gathered + (self.activations or 0)

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes that a rank sends in one update, by (axis of the layout, name of the collective).

        Collectives are assumed to send along rings of ranks. The dict is empty if no step was planned.
        """
        sent_bytes: Counter[tuple[str, str]] = Counter()
        for exchange, volume in (self.exchanges or {}).items():
            sent_bytes[exchange.axis, exchange.kind] += round(exchange.count_sent_bytes(volume.num_bytes))
        return dict(sent_bytes)

    def __str__(self) -> str:
        return "\n".join(describe_plan(self))


def build_plan(strategy: str, layout: Layout, trials: Sequence[StepDryRun], tokens: int) -> Plan:
    """Build the plan for all ranks from the dry runs of some ranks.

    Args:
        strategy: Name of the layout as the user gave it.
        layout: Layout of the run.
        trials: Dry runs of the first replica, one for each pipeline stage. Without a pipeline, a single dry run: of
            rank 0, or of the rank that needs the most memory for updates.
        tokens: Tokens of one data shard in one update, or 0 if unknown.
    """
    parameters, states = _merge_stages(layout, trials)
    at_peak = [trial.activations or 0 for trial in trials]
    shares = RankShares(layout, parameters, states, [trial.buffers for trial in trials], at_peak)
    is_pipeline, has_step = layout.pp > 1, trials[0].volumes is not None
    stages = tuple(
        Stage(
            share=shares.get_share(rank),
            activations=trial.activations,
            exchanges=trial.volumes or {},
            flops=sum((trial.flops or {}).values()),
            events=trial.events,
        )
        for rank, trial in zip(layout.list_groups("pp")[0], trials)
    )
    fullest = max(stages, key=lambda stage: stage.share.num_bytes + (stage.activations or 0))
    return Plan(
        strategy=strategy,
        layout=layout,
        num_parameters=sum(prod(parameter.shape) for parameter in parameters),
        shares=shares,
        exchanges=max(stages, key=lambda stage: stage.sent).exchanges if has_step else None,
        flops=max(stage.flops for stage in stages) if has_step else None,
        activations=fullest.activations,
        gathered=max(_estimate_gathered(stage.exchanges, is_pipeline) for stage in stages),
        tokens=tokens,
        stages=stages if is_pipeline else (),
        traced=max(trial.peak or 0 for trial in trials) if has_step else None,
    )


def _merge_stages(
    layout: Layout, trials: Sequence[StepDryRun]
) -> tuple[tuple[TensorSharding, ...], tuple[StateBytes, ...]]:
    """Merge the parameters of all pipeline stages' dry runs.

    Args:
        layout: Layout of the run.
        trials: Dry runs, one for each pipeline stage.

    Returns:
        The parameters, each with the stages that have it, and the optimizer state of each parameter.
    """
    stages: dict[str, set[int]] = {}
    parameters: dict[str, TensorSharding] = {}
    states: dict[str, StateBytes] = {}
    for stage, trial in enumerate(trials):
        for index, parameter in enumerate(trial.parameters):
            stages.setdefault(parameter.name, set()).add(stage)
            if parameter.name not in parameters:
                parameters[parameter.name] = parameter
                if trial.states:
                    states[parameter.name] = trial.states[index]
    if layout.pp > 1:
        parameters = {name: replace(each, stages=frozenset(stages[name])) for name, each in parameters.items()}
    return tuple(parameters.values()), tuple(states.values())


def _estimate_gathered(volumes: dict[MeteredCollective, Volume], is_pipeline: bool) -> int:
    """Return an estimate of the peak bytes of gathered parameters and their gradients.

    With FSDP, it is the sum for the FSDP unit that computes, the prefetched unit, the root unit and the gradients of
    one unit. The root unit stays gathered. In a pipeline, it is the sum of all parameters of a stage and their
    gradients. It is 0 if nothing is gathered.

    Args:
        volumes: Number of calls and bytes of each kind of collective.
        is_pipeline: Whether the layout has pipeline stages.
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
    """Lower bound of the time of an update, with its parts.

    Attributes:
        compute: Seconds of computation.
        by_axis: Seconds of communication, by axis of the layout. A key can join several axes, as in "shardxtp".
        seconds: Seconds of the update if everything that can overlap does overlap.
        bottleneck: "compute", "bubble", or the axis whose communication takes the longest.
        tokens_per_second: Tokens per second of all ranks together, or 0 if the tokens of an update are unknown.
        per_unit: Seconds of an update multiplied by the number of ranks, per token, or per data shard if the tokens are
            unknown. Layouts are sorted by this value.
        bubble: Those `seconds` that are neither in `compute` nor in `by_axis`, because pipeline ranks wait for each
            other. 0 without a pipeline.
    """

    compute: float
    by_axis: dict[str, float]
    seconds: float
    bottleneck: str
    tokens_per_second: float
    per_unit: float
    bubble: float = 0.0


def describe_plan(plan: Plan, cost: Cost | None = None) -> list[str]:
    """Return a plan as lines of text, with all details.

    Args:
        plan: Plan to describe.
        cost: Cost of the plan, or None to leave it out.
    """
    sizes = " x ".join(f"{size} {axis}" for axis, size in plan.layout.sizes.items()) or "one process"
    lines = [
        f"{plan.strategy} on {plan.num_ranks:,} ranks ({sizes}): {plan.num_parameters:,} parameters",
        *format_columns(
            [["rank", "weights", "of which padding", "gradients", "optimizer state", "total"], *_format_ranks(plan)]
        ),
        *_format_gaps(plan),
        *_format_stages(plan),
        f"activations kept for backward, without temporaries: {format_size(plan.activations)}",
        f"gathered parameters and their gradients, estimated: {format_size(plan.gathered if plan.exchanges is not None else None)}",
        f"a checkpoint: {plan.saved.num_files:,} file(s), {format_bytes(plan.saved.num_bytes)}, of which each rank writes at most "
        f"{format_bytes(plan.saved.per_rank)}",
        f"the most that tensors take at once, with temporaries: {format_size(plan.traced)}",
    ]
    if plan.exchanges is None:
        return [*lines, "communication and FLOPs: not counted, because there is no step to run"]
    if plan.exchanges:
        head = ["phase", "collective", "axis", "ranks", "calls", "bytes", "sent per rank"]
        lines += ["one update sends:", *format_columns([head, *_format_exchanges(plan)])]
    else:
        lines.append("one update sends nothing")
    lines.append(f"one update computes {format_number((plan.flops or 0) / 1e12)} TFLOP per rank")
    if cost is not None:
        parts = [
            f"computing {format_duration(cost.compute)}",
            *(f"{axis} {format_duration(s)}" for axis, s in cost.by_axis.items()),
            *([f"waiting for other stages {format_duration(cost.bubble)}"] if plan.stages else []),
        ]
        lines.append(f"at least {format_duration(cost.seconds)} ({', '.join(parts)}); it waits for {cost.bottleneck}")
    return lines


def _format_ranks(plan: Plan) -> Iterable[list[str]]:
    shares = {share.rank: share for share in (plan.rank0, plan.shares.find_fullest(), plan.last_rank)}
    for rank, share in sorted(shares.items()):
        sizes = share.weights, share.padding, share.gradients, share.optimizer_state, share.num_bytes
        yield [f"{rank:,}", *map(format_bytes, sizes)]


def _format_stages(plan: Plan) -> list[str]:
    if not plan.stages:
        return []
    head = ["stage", "rank", "held", "activations", "total", "sent", "TFLOP"]
    rows = [
        [
            f"{place}",
            f"{stage.share.rank:,}",
            format_bytes(stage.share.num_bytes),
            format_size(stage.activations),
            format_bytes(stage.share.num_bytes + (stage.activations or 0)),
            NOT_COUNTED if plan.exchanges is None else format_bytes(stage.sent),
            NOT_COUNTED if plan.exchanges is None else format_number(stage.flops / 1e12),
        ]
        for place, stage in enumerate(plan.stages)
    ]
    return [
        "by place along the pipeline, where the last lines show the rank that has most of each:",
        *format_columns([head, *rows]),
    ]


def _format_gaps(plan: Plan) -> Iterable[str]:
    if plan.shares.thinnest is None:
        return
    num_holders, name = plan.shares.thinnest
    yield (
        f"{plan.shares.num_with_gaps:,} parameters have fewer rows than there are ranks; only {num_holders:,} ranks hold a "
        f"part of {name}, and {plan.shares.num_empty:,} ranks hold no part of any parameter"
    )


def _format_exchanges(plan: Plan) -> Iterable[list[str]]:
    for exchange, volume in (plan.exchanges or {}).items():
        sizes = format_bytes(volume.num_bytes), format_bytes(exchange.count_sent_bytes(volume.num_bytes))
        yield [exchange.phase, exchange.kind, exchange.axis, f"{exchange.num_ranks:,}", f"{volume.calls:,}", *sizes]


def format_size(size: float | None) -> str:
    """Return a size as text, or "not counted" for None."""
    return NOT_COUNTED if size is None else format_bytes(size)


def format_duration(value: float) -> str:
    """Return a duration as text with three significant digits, in seconds or milliseconds."""
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1000)} ms"
