"""Compute a lower bound for the time of an update from the rates of devices and links, and find the bottleneck.

For a pipeline, `simulate_stages` simulates the events of one rank per stage.
"""

from functools import cache

from headway.planning.cluster import ClusterRates
from headway.planning.dry_run.meter import PlanEvent
from headway.planning.outcome import Cost, Plan
from headway.planning.pipeline_simulation import StageTimeline, simulate_stages

_BLOCKING_AXES = frozenset({"tp", "cp", "ep", "pp"})
"""Axes whose communication blocks the computation. Communication along all other axes overlaps with computation."""


def compute_cost(plan: Plan, cluster: ClusterRates) -> Cost | None:
    """Return the `Cost` of an update on a cluster, which is a lower bound of its time. None if no step was planned."""
    if plan.exchanges is None or plan.flops is None:
        return None
    compute = plan.flops / cluster.flops  # seconds, like all other times here
    by_axis: dict[str, float] = {}
    # Communication that overlaps with computation, by whether it stays within machines. The two links work in parallel.
    overlapping = {True: 0.0, False: 0.0}
    sequential = compute  # computation, and the communication that blocks it
    for exchange, volume in plan.exchanges.items():
        sending = exchange.count_sent_bytes(volume.num_bytes) / cluster.get_rate(exchange.axis, plan.layout)
        by_axis[exchange.axis] = by_axis.get(exchange.axis, 0.0) + sending
        if _BLOCKING_AXES & set(exchange.axis.split("x")):
            sequential += sending
        else:
            overlapping[cluster.is_within_machine(exchange.axis, plan.layout)] += sending
    seconds = max(sequential, *overlapping.values())
    bubble = 0.0
    candidates = {"compute": compute, **by_axis}
    if plan.stages:
        seconds = _simulate_plan(plan, cluster)
        bubble = max(0.0, seconds - compute - sum(by_axis.values()))
        candidates["bubble"] = bubble
    bottleneck = max(candidates, key=lambda name: candidates[name])
    units = plan.layout.num_data_shards * (plan.tokens or 1)
    rate = units / seconds if seconds else 0.0
    return Cost(
        compute=compute,
        by_axis=by_axis,
        seconds=seconds,
        bottleneck=bottleneck,
        tokens_per_second=rate if plan.tokens else 0.0,
        per_unit=plan.num_ranks * seconds / units,
        bubble=bubble,
    )


def _simulate_plan(plan: Plan, cluster: ClusterRates) -> float:
    """Return the duration of a pipeline's update in seconds, from a simulation of one rank per stage.

    In the simulation, a rank computes nothing while it communicates, except while it sends a message to another stage.
    """

    @cache  # a plan has thousands of events, but only a few axes
    def get_rate(axis: str) -> float:
        return cluster.get_rate(axis, plan.layout)

    def compute_seconds(event: PlanEvent) -> float:
        rate = cluster.flops if event.kind == "compute" else get_rate(event.axis)
        return event.amount / rate

    return simulate_stages([StageTimeline(stage.events, stage.share.rank) for stage in plan.stages], compute_seconds)
