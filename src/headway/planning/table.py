"""Plans as text."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from headway.common.text import columns, format_bytes, format_number

# Each of these prints itself by this file, which therefore imports none of them.
Comparison: TypeAlias = Any
Row: TypeAlias = Any
Plan: TypeAlias = Any
Share: TypeAlias = Any
Cost: TypeAlias = Any

_NOT_COUNTED = "not counted"


def tabulate(comparison: Comparison) -> list[str]:
    """The layouts beside each other, then why some do not fit."""
    head = [
        "strategy", "weights", "gradients", "optimizer", "activations", "gathered", "total", "peak", "sent", "update", "waits for",
    ]  # fmt: skip
    has_tokens = any(row.cost is not None and row.cost.tokens_per_second for row in comparison.rows)
    head += ["tokens/s"] if has_tokens else []
    head.append("")
    lines = columns([head, *(_cells(row, has_tokens) for row in comparison.rows if row.plan is not None)])
    reasons = [f"{row.strategy}: {row.reason}" for row in comparison.rows if row.reason]
    return [*lines, *([""] if reasons else []), *reasons]


def _cells(row: Row, has_tokens: bool) -> list[str]:
    plan, found = row.plan, row.cost
    assert plan is not None
    share = plan.shares.fullest()
    cells = [
        row.strategy,
        format_bytes(share.weights),
        *([_NOT_COUNTED] * 3 if plan.exchanges is None else _moving(plan, share)),
        format_bytes(plan.gathered) if plan.exchanges is not None else _NOT_COUNTED,
        format_bytes(plan.total),
        format_bytes(plan.traced) if plan.traced is not None else _NOT_COUNTED,
        _NOT_COUNTED if plan.exchanges is None else format_bytes(sum(_sent(plan).values())),
    ]
    cells += ["-", "-"] if found is None else [_seconds(found.seconds), found.bottleneck]
    if has_tokens:
        cells.append(format_number(found.tokens_per_second) if found is not None else "-")
    return [*cells, "does not fit" if row.reason else ""]


def _moving(plan: Plan, share: Share) -> list[str]:
    return [
        format_bytes(share.gradients),
        format_bytes(share.optimizer_state),
        _NOT_COUNTED if plan.activations is None else format_bytes(plan.activations),
    ]


def _sent(plan: Plan) -> dict[str, float]:
    """{axis: bytes that a rank sends}."""
    found: dict[str, float] = {}
    for exchange, volume in (plan.exchanges or {}).items():
        found[exchange.axis] = found.get(exchange.axis, 0.0) + exchange.sent(volume.num_bytes)
    return found


def describe(plan: Plan, found: Cost | None = None) -> list[str]:
    """One layout in full."""
    sizes = " x ".join(f"{size} {axis}" for axis, size in plan.layout.sizes.items()) or "one process"
    lines = [
        f"{plan.strategy} on {plan.num_ranks:,} ranks ({sizes}): {plan.num_parameters:,} parameters",
        *columns([["rank", "weights", "of which padding", "gradients", "optimizer state", "total"], *_ranks(plan)]),
        *_gaps(plan),
        *_stages(plan),
        f"activations kept for backward, without temporaries: {_counted(plan.activations)}",
        f"gathered parameters and their gradients, estimated: {_counted(plan.gathered if plan.exchanges is not None else None)}",
        f"a checkpoint: {plan.saved.num_files:,} file(s), {format_bytes(plan.saved.num_bytes)}, of which each rank writes at most "
        f"{format_bytes(plan.saved.per_rank)}",
    ]
    lines.append(f"the most that tensors take at once, with temporaries: {_counted(plan.traced)}")
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
            f"computing {_seconds(found.compute)}",
            *(f"{axis} {_seconds(s)}" for axis, s in found.by_axis.items()),
            *([f"waiting for other stages {_seconds(found.bubble)}"] if plan.stages else []),
        ]
        lines.append(f"at least {_seconds(found.seconds)} ({', '.join(parts)}); it waits for {found.bottleneck}")
    return lines


def _ranks(plan: Plan) -> list[list[str]]:
    shares = {share.rank: share for share in (plan.rank0, plan.shares.fullest(), plan.last_rank)}
    return [
        [
            f"{rank:,}",
            *(
                format_bytes(size)
                for size in (share.weights, share.padding, share.gradients, share.optimizer_state, share.num_bytes)
            ),
        ]
        for rank, share in sorted(shares.items())
    ]


def _stages(plan: Plan) -> list[str]:
    if not plan.stages:
        return []
    head = ["stage", "rank", "held", "activations", "total", "sent", "TFLOP"]
    rows = [
        [
            f"{place}",
            f"{stage.share.rank:,}",
            format_bytes(stage.share.num_bytes),
            _counted(stage.activations),
            format_bytes(stage.share.num_bytes + (stage.activations or 0)),
            _NOT_COUNTED if plan.exchanges is None else format_bytes(stage.sent),
            _NOT_COUNTED if plan.exchanges is None else format_number(stage.flops / 1e12),
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


def _counted(size: int | None) -> str:
    return _NOT_COUNTED if size is None else format_bytes(size)


def _seconds(value: float) -> str:
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1000)} ms"
