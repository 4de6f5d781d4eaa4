"""Plans as JSON: plain dicts, with all numbers in bytes, seconds or FLOPs."""

from dataclasses import asdict
from typing import Any

from headway.planning.compare import ComparedPlan, PlanComparison
from headway.planning.outcome import Plan


def as_dict(comparison: PlanComparison) -> dict[str, Any]:
    """A comparison, its rows in their order."""
    return {"cluster": asdict(comparison.cluster), "layouts": [_row(row) for row in comparison.rows]}


def _row(row: ComparedPlan) -> dict[str, Any]:
    found: dict[str, Any] = {"strategy": row.strategy, "fits": not row.reason, "reason": row.reason or None}
    if row.plan is not None:
        found |= plan_as_dict(row.plan)
    if row.cost is not None:
        found["cost"] = asdict(row.cost)
    return found


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """One layout."""
    shares = {"rank0": plan.rank0, "fullest": plan.shares.fullest(), "last": plan.last_rank}
    return {
        "num_ranks": plan.num_ranks,
        "axes": plan.layout.sizes,
        "num_parameters": plan.num_parameters,
        "ranks": {name: asdict(share) | {"num_bytes": share.num_bytes} for name, share in shares.items()},
        "empty_ranks": plan.shares.num_empty,
        "parameters_with_gaps": plan.shares.num_with_gaps,
        "activations": plan.activations,
        "gathered": plan.gathered if plan.exchanges is not None else None,
        "total": plan.total,
        "peak": plan.peak,
        "checkpoint": asdict(plan.saved),
        "exchanges": None
        if plan.exchanges is None
        else [
            asdict(exchange) | asdict(volume) | {"sent": exchange.sent(volume.num_bytes)}
            for exchange, volume in plan.exchanges.items()
        ],
        "stages": [
            {
                "held": asdict(stage.share) | {"num_bytes": stage.share.num_bytes},
                "activations": stage.activations,
                "sent": stage.sent,
                "flops": stage.flops,
            }
            for stage in plan.stages
        ],
        "flops": plan.flops,
        "tokens": plan.tokens,
    }
