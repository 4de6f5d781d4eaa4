"""Combine dry runs into a plan: the memory, communication and checkpoint size of each rank, as numbers and as text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from headway.common.text import format_bytes, format_columns, format_number
from headway.core.config.mesh import Layout
from headway.planning.dry_run.meter import MeteredCollective, PlanEvent, Volume
from headway.planning.dry_run.rank_update import StepDryRun
from headway.planning.dry_run.states import StateBytes
from headway.planning.dry_run.tensor_sharding import TensorSharding
from headway.planning.rank_shares import CheckpointSize, RankShare, RankShares

NOT_COUNTED = "not counted"
"""Text in place of a number that was not counted."""


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
        traced_peak: Traced peak bytes of tensors, including temporaries, on rank 0. If single ranks update full
            parameters for all others, those of the rank that needs the most memory for updates. For a pipeline, those
            of the rank with the highest peak. None if no step was planned.
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
    traced_peak: int | None = None

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
        return self.total if self.traced_peak is None else self.traced_peak

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


def build_plan(strategy: str, layout: Layout, dry_runs: Sequence[StepDryRun], tokens: int) -> Plan:
    """Build the plan for all ranks from the dry runs of some ranks.

    Args:
        strategy: Name of the layout as the user gave it.
        layout: Layout of the run.
        dry_runs: Dry runs of the first replica, one for each pipeline stage. Without a pipeline, a single dry run: of
            rank 0, or of the rank that needs the most memory for updates.
        tokens: Tokens of one data shard in one update, or 0 if unknown.
    """
    parameters, states = _merge_stages(layout, dry_runs)
    at_peak = [dry_run.activations or 0 for dry_run in dry_runs]
    shares = RankShares(layout, parameters, states, [dry_run.buffers for dry_run in dry_runs], at_peak)
    is_pipeline, has_step = layout.pp > 1, dry_runs[0].volumes is not None
    # Without a pipeline, rank 0 alone is handled as one stage.
    stages = tuple(
        Stage(
            share=shares.get_share(rank),
            activations=dry_run.activations,
            exchanges=dry_run.volumes or {},
            flops=sum((dry_run.flops or {}).values()),
            events=dry_run.events,
        )
        for rank, dry_run in zip(layout.list_groups("pp")[0], dry_runs)
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
        traced_peak=max(dry_run.peak or 0 for dry_run in dry_runs) if has_step else None,
    )


def _merge_stages(
    layout: Layout, dry_runs: Sequence[StepDryRun]
) -> tuple[tuple[TensorSharding, ...], tuple[StateBytes, ...]]:
    """Merge the parameters of all pipeline stages' dry runs.

    Args:
        layout: Layout of the run.
        dry_runs: Dry runs, one for each pipeline stage.

    Returns:
        The parameters, each with the stages that have it, and the optimizer state of each parameter.
    """
    stages: dict[str, set[int]] = {}
    parameters: dict[str, TensorSharding] = {}
    states: dict[str, StateBytes] = {}
    for stage, dry_run in enumerate(dry_runs):
        for index, parameter in enumerate(dry_run.parameters):
            stages.setdefault(parameter.name, set()).add(stage)
            if parameter.name not in parameters:
                parameters[parameter.name] = parameter
                if dry_run.states:
                    states[parameter.name] = dry_run.states[index]
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
    # The root unit is gathered only in forward, the other units in forward and backward. So if the root unit is the
    # largest one, the smaller of both phases' maxima is the size of another unit.
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
        f"the most that tensors take at once, with temporaries: {format_size(plan.traced_peak)}",
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
    """Yield the cells of one row for the first rank, the last rank, and the rank that needs the most memory."""
    shares = {share.rank: share for share in (plan.rank0, plan.shares.find_fullest(), plan.last_rank)}
    for rank, share in sorted(shares.items()):
        sizes = share.weights, share.padding, share.gradients, share.optimizer_state, share.num_bytes
        yield [f"{rank:,}", *map(format_bytes, sizes)]


def _format_stages(plan: Plan) -> list[str]:
    """Return a table of the pipeline stages as lines of text. Empty without a pipeline."""
    if not plan.stages:
        return []
    head = ["stage", "rank", "held", "activations", "total", "sent", "TFLOP"]
    rows = [
        [
            f"{stage_index}",
            f"{stage.share.rank:,}",
            format_bytes(stage.share.num_bytes),
            format_size(stage.activations),
            format_bytes(stage.share.num_bytes + (stage.activations or 0)),
            NOT_COUNTED if plan.exchanges is None else format_bytes(stage.sent),
            NOT_COUNTED if plan.exchanges is None else format_number(stage.flops / 1e12),
        ]
        for stage_index, stage in enumerate(plan.stages)
    ]
    return [
        "per pipeline stage, for one rank of each; the last lines show the rank that has the most of each:",
        *format_columns([head, *rows]),
    ]


def _format_gaps(plan: Plan) -> Iterable[str]:
    """Yield a line about the parameters that have no element on some ranks, if there are such parameters."""
    rarest = plan.shares.rarest
    if rarest is None:
        return
    yield (
        f"{plan.shares.num_with_gaps:,} parameters have fewer rows than there are ranks; only {rarest.num_ranks:,} ranks have a "
        f"part of {rarest.name}, and {plan.shares.num_empty:,} ranks have no part of any parameter"
    )


def _format_exchanges(plan: Plan) -> Iterable[list[str]]:
    """Yield the cells of one row for each kind of collective in an update."""
    for exchange, volume in (plan.exchanges or {}).items():
        sizes = format_bytes(volume.num_bytes), format_bytes(exchange.count_sent_bytes(volume.num_bytes))
        yield [exchange.phase, exchange.kind, exchange.axis, f"{exchange.num_ranks:,}", f"{volume.calls:,}", *sizes]


def format_size(size: float | None) -> str:
    """Return a size as text, or "not counted" for None."""
    return NOT_COUNTED if size is None else format_bytes(size)


def format_duration(value: float) -> str:
    """Return a duration as text with three significant digits, in seconds or milliseconds."""
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1000)} ms"
