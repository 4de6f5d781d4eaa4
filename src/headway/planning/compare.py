"""Compares several layouts of one run, starting with the cheapest that fits; as text, and as JSON in bytes, seconds and FLOPs."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from headway.common.text import columns, format_bytes, format_number
from headway.config.engines import collect_options
from headway.config.mesh import Layout, parse
from headway.config.values import check_count
from headway.errors import ConfigError, HeadwayError, StateError, UnsupportedError
from headway.forecasting.device.devices import DEVICES
from headway.forecasting.tracing.step import check_precision
from headway.planning.costs import ClusterRates, cost
from headway.planning.dry_run.drive import Step
from headway.planning.dry_run.fake_group import PeerAnswer
from headway.planning.dry_run.meter import MeteredCollective, Volume
from headway.planning.dry_run.trial import (
    StepDryRun,
    dry_run_rank,
    dry_run_repeated,
    dry_run_stages,
    treats_blocks_alike,
)
from headway.planning.optimizers import Optimizer, maker
from headway.planning.outcome import Cost, Plan, RankShare, bytes_sent, counted, in_seconds, outcome

logger = logging.getLogger(__name__)

_CARD = replace(DEVICES["h100"], cublas=0)
"""Whose kernels a plan counts; the workspaces of cuBLAS are as large whatever the model."""


@dataclass(frozen=True)
class ComparedPlan:
    """One layout.

    Attributes:
        strategy: as it was asked for.
        plan: None where the layout cannot be.
        cost: None where no step was planned.
        reason: why the run cannot be, or does not fit; "" where it does.
    """

    strategy: str
    plan: Plan | None
    cost: Cost | None
    reason: str = ""


@dataclass(frozen=True)
class PlanComparison:
    """Layouts of one run.

    Attributes:
        rows: the cheapest that fits first; then those that do not fit, the smallest first; then those that cannot be.
        cluster: what they were judged by.
    """

    rows: tuple[ComparedPlan, ...]
    cluster: ClusterRates = field(default_factory=ClusterRates)

    @property
    def best(self) -> ComparedPlan | None:
        """The cheapest that fits; None: none does."""
        return next((row for row in self.rows if not row.reason), None)

    def __str__(self) -> str:
        return "\n".join(tabulate(self))


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
    """What each rank of a run would hold, send and write: the run's own preparation, without memory and without processes.

    Args:
        make: makes the model; it is called within `init_empty_weights()`, where parameters take no memory.
        strategy: the layout, such as "fsdp", "hsdp=8" or "fsdp+tp=8".
        num_ranks: of the run.
        step: model -> loss, for one batch of one data shard. It is called with tensors that have shapes and no values. None: what is
            sent, computed and kept for backward is not counted.
        optimizer: "adamw", "adam", "sgd", "momentum" or "none", or a function from parameters to an optimizer of torch.
        precision: "no", "bf16" or "fp16", as the Accelerator's `mixed_precision`.
        tokens: of a batch of one data shard, for rates.
        kwargs_handlers: the Accelerator's: ShardingOptions, TensorParallelOptions, PipelineOptions, TorchContextParallelConfig,
            ActivationCheckpointing.
        machine_ranks: ranks on one machine.

    Raises:
        ConfigError: the layout does not divide the ranks, or another argument is wrong.
        StateError: this process has joined a process group.
        UnsupportedError: the layout or the model is one that cannot be sharded.
    """
    check_count(num_ranks=num_ranks)
    check_precision(precision)
    layout = _resolved(strategy, num_ranks, machine_ranks) if isinstance(strategy, str) else strategy
    if layout.num_ranks != num_ranks:
        raise ConfigError(f"the layout {layout} takes {layout.num_ranks} ranks, but the run has {num_ranks}")
    name = strategy if isinstance(strategy, str) else "+".join(f"{k}={v}" for k, v in layout.sizes.items())
    options = collect_options(kwargs_handlers)
    given = step, maker(optimizer), precision, options, machine_ranks

    def trial(rank: int, told: PeerAnswer | None = None, make: Callable[[], nn.Module] = make) -> StepDryRun:
        return dry_run_rank(make, layout, rank, *given, told, _CARD)

    if layout.pp > 1:
        return outcome(name, layout, dry_run_stages(layout, trial), tokens)
    can_repeat = step is not None and treats_blocks_alike(options)
    found = dry_run_repeated(make, lambda short: trial(0, make=short)) if can_repeat else None
    return outcome(name, layout, (found or trial(0),), tokens)


def compare(
    plan_layout: Callable[[str], Plan], strategies: Iterable[str], cluster: ClusterRates | None = None
) -> PlanComparison:
    """Plan several layouts; one that cannot be is a row with its reason.

    Args:
        plan_layout: plans one, as `partial(plan, make, num_ranks=8)` does.
        strategies: the layouts.
        cluster: rates and memory to judge by.

    Raises:
        StateError: this process has joined a process group.
    """
    cluster = cluster or ClusterRates()
    rows = []
    for strategy in strategies:
        logger.info("planning %s", strategy)
        try:
            found = plan_layout(strategy)
        except StateError:
            raise
        except HeadwayError as error:
            rows.append(ComparedPlan(strategy, None, None, str(error)))
            continue
        rows.append(ComparedPlan(strategy, found, cost(found, cluster), _too_much(found, cluster)))
    return PlanComparison(tuple(sorted(rows, key=_order)), cluster)


def _resolved(strategy: str, num_ranks: int, machine_ranks: int) -> Layout:
    asked = parse(strategy)
    if asked.is_deepspeed:
        raise UnsupportedError(
            f"{strategy} is DeepSpeed's engine, which is not planned; fsdp cuts what zero3 does, and says what that takes"
        )
    return asked.resolve(num_ranks, machine_ranks)


def candidates(num_ranks: int, machine_ranks: int, has_plan: bool = False) -> Sequence[str]:
    """Layouts worth a look, where none was asked for.

    Args:
        num_ranks: of the run.
        machine_ranks: of one machine.
        has_plan: does the model say how its matrices are cut?
    """
    found = ["ddp", "fsdp"]
    inside = [size for size in (machine_ranks, 2 * machine_ranks, 8 * machine_ranks) if size < num_ranks]
    found += [f"hsdp={size}" for size in inside if size > 1 and num_ranks % size == 0]
    if has_plan and 1 < machine_ranks < num_ranks and num_ranks % machine_ranks == 0:
        found.append(f"fsdp+tp={machine_ranks}")
    return found


def _too_much(found: Plan, cluster: ClusterRates) -> str:
    if cluster.memory is None or found.peak <= cluster.memory:
        return ""
    share = found.shares.fullest()
    parts = {
        "weights": share.weights,
        "gradients": share.gradients,
        "optimizer state": share.optimizer_state,
        "activations": found.activations or 0,
        "gathered parameters": found.gathered,
        "temporaries": found.peak - found.total,
    }
    most = max(parts, key=lambda name: parts[name])
    return (
        f"needs {format_bytes(found.peak)} per rank, {format_bytes(found.peak - cluster.memory)} more than available; mostly "
        f"{most} ({format_bytes(parts[most])})"
    )


def _order(row: ComparedPlan) -> tuple[int, float]:
    if row.plan is None:
        return 2, 0.0
    if row.reason:
        return 1, float(row.plan.peak)
    return 0, row.cost.per_unit if row.cost is not None else float(row.plan.peak)


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
        "ranks": {name: _share(share) for name, share in shares.items()},
        "empty_ranks": plan.shares.num_empty,
        "parameters_with_gaps": plan.shares.num_with_gaps,
        "activations": plan.activations,
        "gathered": plan.gathered if plan.exchanges is not None else None,
        "total": plan.total,
        "peak": plan.peak,
        "checkpoint": asdict(plan.saved),
        "exchanges": None if plan.exchanges is None else [_exchange(*each) for each in plan.exchanges.items()],
        "stages": [
            {"held": _share(stage.share), "activations": stage.activations, "sent": stage.sent, "flops": stage.flops}
            for stage in plan.stages
        ],
        "flops": plan.flops,
        "tokens": plan.tokens,
    }


def _share(share: RankShare) -> dict[str, Any]:
    return asdict(share) | {"num_bytes": share.num_bytes}


def _exchange(exchange: MeteredCollective, volume: Volume) -> dict[str, Any]:
    return asdict(exchange) | asdict(volume) | {"sent": exchange.sent(volume.num_bytes)}


def tabulate(comparison: PlanComparison) -> list[str]:
    """The layouts beside each other, then why some do not fit."""
    head = [
        "strategy", "weights", "gradients", "optimizer", "activations", "gathered", "total", "peak", "sent", "update", "waits for",
    ]  # fmt: skip
    has_tokens = any(row.cost is not None and row.cost.tokens_per_second for row in comparison.rows)
    head += ["tokens/s"] if has_tokens else []
    head.append("")
    lines = columns([head, *(_cells(row, row.plan, has_tokens) for row in comparison.rows if row.plan is not None)])
    reasons = [f"{row.strategy}: {row.reason}" for row in comparison.rows if row.reason]
    return [*lines, *([""] if reasons else []), *reasons]


def _cells(row: ComparedPlan, plan: Plan, has_tokens: bool) -> list[str]:
    share, found = plan.shares.fullest(), row.cost
    sizes: list[float | None] = [None] * 4
    if plan.exchanges is not None:
        sizes = [share.gradients, share.optimizer_state, plan.activations, plan.gathered]
    sent = None if plan.exchanges is None else bytes_sent(plan.exchanges)
    cells = [row.strategy, format_bytes(share.weights), *map(counted, [*sizes, plan.total, plan.traced, sent])]
    cells += ["-", "-"] if found is None else [in_seconds(found.seconds), found.bottleneck]
    if has_tokens:
        cells.append(format_number(found.tokens_per_second) if found is not None else "-")
    return [*cells, "does not fit" if row.reason else ""]
