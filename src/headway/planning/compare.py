"""Plan several layouts of one run and compare them, as a table or as JSON.

JSON has bytes, seconds and FLOPs without rounding. The cheapest layout that fits is listed first.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from headway.common.text import format_bytes, format_columns, format_number
from headway.core.config.engines import collect_options
from headway.core.config.mesh import Layout, parse_layout
from headway.core.config.values import check_count
from headway.errors import ConfigError, HeadwayError, UnsupportedError
from headway.forecasting.device.devices import DEVICES
from headway.forecasting.tracing.attention_masks import POSITIONS, skip_causal_mask
from headway.forecasting.tracing.step import check_precision
from headway.planning.costs import ClusterRates, compute_cost
from headway.planning.dry_run.drive import BatchStep, Step
from headway.planning.dry_run.fake_group import PeerObjects, require_no_group
from headway.planning.dry_run.meter import MeteredCollective, Volume
from headway.planning.dry_run.trial import (
    StepDryRun,
    can_repeat_blocks,
    dry_run_rank,
    dry_run_repeated,
    dry_run_stages,
)
from headway.planning.dry_run.updates import find_fullest_owner
from headway.planning.optimizers import Optimizer, resolve_optimizer
from headway.planning.outcome import Cost, Plan, RankShare, build_plan, count_bytes_sent, format_duration, format_size

logger = logging.getLogger(__name__)

_ASSUMED_DEVICE = replace(DEVICES["h100"], cublas=0)
"""Device that a plan assumes when it adds the scratch memory of kernels.

cuBLAS's workspace is left out, because it is equal for all models.
"""


@dataclass(frozen=True)
class ComparedPlan:
    """Plan and cost of one layout in a comparison.

    Attributes:
        strategy: Name of the layout as the user gave it.
        plan: Plan of the layout, or None if the layout is not possible.
        cost: Lower bound of the time of an update. None if no step was planned or the layout is not possible.
        reason: Reason why the layout is not possible or does not fit. Empty if it fits.
    """

    strategy: str
    plan: Plan | None
    cost: Cost | None
    reason: str = ""


@dataclass(frozen=True)
class PlanComparison:
    """Comparison of several layouts of one run.

    Attributes:
        rows: Plans of the layouts: first those that fit, by cost, then those that do not fit, by memory, then those
            that are not possible. Without a step there are no costs, and layouts that fit are sorted by memory.
        cluster: Bandwidths, computing rate and memory that were assumed for the comparison.
    """

    rows: tuple[ComparedPlan, ...]
    cluster: ClusterRates = field(default_factory=ClusterRates)

    @property
    def best(self) -> ComparedPlan | None:
        """Plan of the cheapest layout that fits, or None if none fits."""
        return next((row for row in self.rows if not row.reason), None)

    def __str__(self) -> str:
        return "\n".join(format_comparison(self))


def plan(
    make: Callable[[], nn.Module],
    strategy: str | Layout,
    num_ranks: int,
    *,
    step: Step | None = None,
    optimizer: Optimizer = "adamw",
    precision: str = "no",
    tokens: int = 0,
    kwargs_handlers: list[Any] | None = None,
    machine_ranks: int = 8,
) -> Plan:
    """Plan the memory, communication and checkpoint size of each rank of a run.

    The model is prepared as in the run, but without allocating memory and without starting processes.

    Args:
        make: Function that makes the model. It is called within `init_empty_weights()`, where parameters take no
            memory.
        strategy: Layout, such as "fsdp", "hsdp=8" or "fsdp+tp=8", or a `Layout` object.
        num_ranks: World size of the run.
        step: Function from the model to the loss of one data shard's batch. It is called with tensors that have shapes
            but no values. A transformers model builds no causal mask, as in a run without padding, unless the step has a
            method `inputs()` whose result has position IDs. With None, the plan does not count communication,
            computation and activations.
        optimizer: Name of an optimizer, or a function that makes a torch optimizer from parameters. "none" plans
            without an update.
        precision: "no", "bf16" or "fp16", like the Accelerator's `mixed_precision`.
        tokens: Tokens in the batch of one data shard, used to compute tokens per second. 0 if unknown.
        kwargs_handlers: Options that the Accelerator accepts as `kwargs_handlers`: ShardingOptions,
            TensorParallelOptions, PipelineOptions, TorchContextParallelConfig, ActivationCheckpointing. None: none.
        machine_ranks: Ranks per machine. Default: 8.

    Raises:
        ConfigError: If the layout does not divide the ranks, or another argument is wrong.
        OptionalDependencyMissing: If the package of a named optimizer is not installed.
        PrepareError: If the model cannot be sharded.
        StateError: If this process has joined a process group.
        UnsupportedError: If the layout cannot be planned, or the step cannot be run without values.
    """
    check_count(num_ranks=num_ranks)
    check_precision(precision)
    layout = _resolve_layout(strategy, num_ranks, machine_ranks) if isinstance(strategy, str) else strategy
    if layout.num_ranks != num_ranks:
        raise ConfigError(f"the layout {layout} takes {layout.num_ranks} ranks, but the run has {num_ranks}")
    name = strategy if isinstance(strategy, str) else "+".join(f"{k}={v}" for k, v in layout.sizes.items())
    options = collect_options(kwargs_handlers)
    make_optimizer = resolve_optimizer(optimizer)
    make = partial(_make_unmasked, make, step)

    def run_trial(
        rank: int, peer_objects: PeerObjects | None = None, make: Callable[[], nn.Module] = make
    ) -> StepDryRun:
        return dry_run_rank(
            make,
            layout,
            rank,
            step=step,
            make_optimizer=make_optimizer,
            precision=precision,
            options=options,
            machine_ranks=machine_ranks,
            peer_objects=peer_objects,
            device=_ASSUMED_DEVICE,
        )

    if layout.pp > 1:
        return build_plan(name, layout, dry_run_stages(layout, run_trial), tokens)
    if step is None:
        return build_plan(name, layout, (run_trial(0),), tokens)
    owner = find_fullest_owner(make, optimizer, make_optimizer, layout, options, machine_ranks)
    extrapolated: StepDryRun | None = None
    # With owners, another block can change the owners of all parameters.
    if owner is None and can_repeat_blocks(options):
        extrapolated = dry_run_repeated(make, lambda make_shortened: run_trial(0, make=make_shortened))
    return build_plan(name, layout, (extrapolated or run_trial(owner or 0),), tokens)


def _make_unmasked(make: Callable[[], nn.Module], step: Step | None) -> nn.Module:
    """Make a model that builds no causal mask, as in a run without padding, unless the batch has position IDs.

    transformers reads the values of a mask, and builds none if no token is masked. A plan has no values to read. With a
    mask, attention also communicates differently under context parallelism.

    Args:
        make: Function that makes the model.
        step: Training step, or None.
    """
    model = make()
    inputs = step.inputs() if isinstance(step, BatchStep) else None
    is_packed = isinstance(inputs, dict) and POSITIONS in inputs
    return skip_causal_mask(model) if hasattr(model, "set_attn_implementation") and not is_packed else model


def compare_layouts(
    plan_layout: Callable[[str], Plan], strategies: Iterable[str], cluster: ClusterRates | None = None
) -> PlanComparison:
    """Plan several layouts and compare them. A layout that is not possible becomes a row with the reason.

    Args:
        plan_layout: Function that plans one layout, such as `partial(plan, make, num_ranks=8)`.
        strategies: Layouts to compare.
        cluster: Bandwidths, computing rate and memory to assume for the comparison, or None for the defaults.

    Raises:
        StateError: If this process has joined a process group.
    """
    require_no_group()  # this error concerns all layouts, so it is not the reason of one row
    cluster = cluster or ClusterRates()
    rows = []
    for strategy in strategies:
        logger.info("planning %s", strategy)
        try:
            planned = plan_layout(strategy)
            row = ComparedPlan(strategy, planned, compute_cost(planned, cluster), _explain_misfit(planned, cluster))
        except HeadwayError as error:
            row = ComparedPlan(strategy, None, None, str(error))
        rows.append(row)
    return PlanComparison(tuple(sorted(rows, key=_rank_row)), cluster)


def _resolve_layout(strategy: str, num_ranks: int, machine_ranks: int) -> Layout:
    requested = parse_layout(strategy)
    if requested.is_deepspeed:
        raise UnsupportedError(
            f"{strategy} is DeepSpeed's engine, which cannot be planned; plan fsdp instead, which shards what zero3 does"
        )
    return requested.resolve(num_ranks, machine_ranks)


def list_candidates(num_ranks: int, machine_ranks: int, has_tp_plan: bool = False) -> Sequence[str]:
    """Return the names of the layouts that are compared by default.

    Args:
        num_ranks: World size of the run.
        machine_ranks: Ranks per machine.
        has_tp_plan: Whether the model defines how tensor parallelism splits its weight matrices.
    """
    candidates = ["ddp", "fsdp"]
    inside = [size for size in (machine_ranks, 2 * machine_ranks, 8 * machine_ranks) if size < num_ranks]
    candidates += [f"hsdp={size}" for size in inside if size > 1 and num_ranks % size == 0]
    if has_tp_plan and 1 < machine_ranks < num_ranks and num_ranks % machine_ranks == 0:
        candidates.append(f"fsdp+tp={machine_ranks}")
    return candidates


def _explain_misfit(plan: Plan, cluster: ClusterRates) -> str:
    """Return text about how much memory a plan lacks and what uses most of its memory, or "" if the plan fits."""
    if cluster.memory is None or plan.peak <= cluster.memory:
        return ""
    share = plan.shares.find_fullest()
    parts = {
        "weights": share.weights,
        "gradients": share.gradients,
        "optimizer state": share.optimizer_state,
        "activations": plan.activations or 0,
        "gathered parameters": plan.gathered,
        "temporaries": plan.peak - plan.total,
    }
    most = max(parts, key=lambda name: parts[name])
    return (
        f"needs {format_bytes(plan.peak)} per rank, {format_bytes(plan.peak - cluster.memory)} more than available; mostly "
        f"{most} ({format_bytes(parts[most])})"
    )


def _rank_row(row: ComparedPlan) -> tuple[int, float]:
    """Return the sort key of a row, which puts layouts that fit first, then those that do not, then impossible ones."""
    if row.plan is None:
        return 2, 0.0
    if row.reason:
        return 1, float(row.plan.peak)
    return 0, row.cost.per_unit if row.cost is not None else float(row.plan.peak)


def comparison_as_dict(comparison: PlanComparison) -> dict[str, Any]:
    """Return a comparison as nested dictionaries that can be written as JSON. Rows keep their order."""
    return {"cluster": asdict(comparison.cluster), "layouts": [_row_as_dict(row) for row in comparison.rows]}


def _row_as_dict(row: ComparedPlan) -> dict[str, Any]:
    row_dict: dict[str, Any] = {"strategy": row.strategy, "fits": not row.reason, "reason": row.reason or None}
    if row.plan is not None:
        row_dict |= plan_as_dict(row.plan)
    if row.cost is not None:
        row_dict["cost"] = asdict(row.cost)
    return row_dict


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as nested dictionaries that can be written as JSON."""
    shares = {"rank0": plan.rank0, "fullest": plan.shares.find_fullest(), "last": plan.last_rank}
    return {
        "num_ranks": plan.num_ranks,
        "axes": plan.layout.sizes,
        "num_parameters": plan.num_parameters,
        "ranks": {name: _share_as_dict(share) for name, share in shares.items()},
        "empty_ranks": plan.shares.num_empty,
        "parameters_with_gaps": plan.shares.num_with_gaps,
        "activations": plan.activations,
        "gathered": plan.gathered if plan.exchanges is not None else None,
        "total": plan.total,
        "peak": plan.peak,
        "checkpoint": asdict(plan.saved),
        "exchanges": None if plan.exchanges is None else [_exchange_as_dict(*each) for each in plan.exchanges.items()],
        "stages": [
            {
                "held": _share_as_dict(stage.share),
                "activations": stage.activations,
                "sent": stage.sent,
                "flops": stage.flops,
            }
            for stage in plan.stages
        ],
        "flops": plan.flops,
        "tokens": plan.tokens,
    }


def _share_as_dict(share: RankShare) -> dict[str, Any]:
    return asdict(share) | {"num_bytes": share.num_bytes}


def _exchange_as_dict(exchange: MeteredCollective, volume: Volume) -> dict[str, Any]:
    return asdict(exchange) | asdict(volume) | {"sent": exchange.count_sent_bytes(volume.num_bytes)}


def format_comparison(comparison: PlanComparison) -> list[str]:
    """Return the comparison as lines of text: a table of the layouts, the reasons why some do not fit, and a legend."""
    head = [
        "strategy", "weights", "gradients", "optimizer", "activations", "gathered", "total", "peak", "sent", "update", "waits for",
    ]  # fmt: skip
    has_tokens = any(row.cost is not None and row.cost.tokens_per_second for row in comparison.rows)
    head += ["tokens/s"] if has_tokens else []
    head.append("")
    lines = format_columns(
        [head, *(_format_cells(row, row.plan, has_tokens) for row in comparison.rows if row.plan is not None)]
    )
    reasons = [f"{row.strategy}: {row.reason}" for row in comparison.rows if row.reason]
    return [*lines, *([""] if reasons else []), *reasons, "", *_explain_columns(comparison)]


def _explain_columns(comparison: PlanComparison) -> list[str]:
    """Return the meaning of the table's columns as lines of text."""
    lines = [
        "memory of the fullest rank: total is the sum of weights, gradients, optimizer state, activations and gathered parameters;",
        "  peak is the most that tensors take at once in an update, with temporaries",
    ]
    plans = [row.plan for row in comparison.rows if row.plan is not None]
    if any(plan.traced is not None and plan.traced < plan.total for plan in plans):
        lines.append("  peak is below total if the parts do not reach their maximum at the same moment")
    if any(plan.exchanges is not None for plan in plans):
        lines += [
            "one update: sent is what a rank sends to others; update is the least time it takes;",
            "  waits for is the computation, or the axis of the layout, that takes the longest",
        ]
    return lines


def _format_cells(row: ComparedPlan, plan: Plan, has_tokens: bool) -> list[str]:
    share, cost = plan.shares.find_fullest(), row.cost
    sizes: list[float | None] = [None] * 4
    if plan.exchanges is not None:
        sizes = [share.gradients, share.optimizer_state, plan.activations, plan.gathered]
    sent = None if plan.exchanges is None else count_bytes_sent(plan.exchanges)
    cells = [row.strategy, format_bytes(share.weights), *map(format_size, [*sizes, plan.total, plan.traced, sent])]
    cells += ["-", "-"] if cost is None else [format_duration(cost.seconds), cost.bottleneck]
    if has_tokens:
        cells.append(format_number(cost.tokens_per_second) if cost is not None else "-")
    return [*cells, "does not fit" if row.reason else ""]
