"""Compare the plans of several layouts of one run, as a table or as JSON. The cheapest layout that fits is listed first.

JSON has bytes, seconds and FLOPs without rounding.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.common.text import format_bytes, format_columns, format_number
from headway.errors import HeadwayError
from headway.planning.cluster import ClusterRates
from headway.planning.costs import compute_cost
from headway.planning.dry_run.fake_group import require_no_group
from headway.planning.dry_run.meter import MeteredCollective, Volume
from headway.planning.outcome import Cost, Plan, count_bytes_sent, format_duration, format_size
from headway.planning.rank_shares import RankShare

logger = logging.getLogger(__name__)


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
    return {"cluster": asdict(comparison.cluster), "layouts": [_convert_row(row) for row in comparison.rows]}


def _convert_row(row: ComparedPlan) -> dict[str, Any]:
    """Return a row of the comparison as a dict for JSON. A layout that could not be planned has only a reason."""
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
        "ranks": {name: _convert_share(share) for name, share in shares.items()},
        "empty_ranks": plan.shares.num_empty,
        "parameters_with_gaps": plan.shares.num_with_gaps,
        "activations": plan.activations,
        "gathered": plan.gathered if plan.exchanges is not None else None,
        "total": plan.total,
        "peak": plan.peak,
        "checkpoint": asdict(plan.saved),
        "exchanges": None if plan.exchanges is None else [_convert_exchange(*each) for each in plan.exchanges.items()],
        "stages": [
            {
                "held": _convert_share(stage.share),
                "activations": stage.activations,
                "sent": stage.sent,
                "flops": stage.flops,
            }
            for stage in plan.stages
        ],
        "flops": plan.flops,
        "tokens": plan.tokens,
    }


def _convert_share(share: RankShare) -> dict[str, Any]:
    """Return a rank's memory as a dict for JSON, with its sum."""
    return asdict(share) | {"num_bytes": share.num_bytes}


def _convert_exchange(exchange: MeteredCollective, volume: Volume) -> dict[str, Any]:
    """Return the calls and bytes of a collective as a dict for JSON, with the bytes that a rank sends."""
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
    if any(plan.traced_peak is not None and plan.traced_peak < plan.total for plan in plans):
        lines.append("  peak is below total if the parts do not reach their maximum at the same moment")
    if any(plan.exchanges is not None for plan in plans):
        lines += [
            "one update: sent is what a rank sends to others; update is the least time it takes;",
            "  waits for is the computation, or the axis of the layout, that takes the longest",
        ]
    return lines


def _format_cells(row: ComparedPlan, plan: Plan, has_tokens: bool) -> list[str]:
    """Return the cells of a table row for a layout.

    Args:
        row: Row of the comparison.
        plan: Plan of the row.
        has_tokens: Whether the table has a column for tokens per second.
    """
    share, cost = plan.shares.find_fullest(), row.cost
    sizes: list[float | None] = [None] * 4
    if plan.exchanges is not None:
        sizes = [share.gradients, share.optimizer_state, plan.activations, plan.gathered]
    sent = None if plan.exchanges is None else count_bytes_sent(plan.exchanges)
    cells = [row.strategy, format_bytes(share.weights), *map(format_size, [*sizes, plan.total, plan.traced_peak, sent])]
    cells += ["-", "-"] if cost is None else [format_duration(cost.seconds), cost.bottleneck]
    if has_tokens:
        cells.append(format_number(cost.tokens_per_second) if cost is not None else "-")
    return [*cells, "does not fit" if row.reason else ""]
