"""How long an update takes at least, for given rates of devices and links, and what it waits for.

Of a pipeline, what each of its ranks does is gone through in order, with the waiting for the others.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from headway.config.mesh import Layout
from headway.errors import ConfigError, StateError
from headway.planning.dry_run.meter import PlanEvent
from headway.planning.outcome import Cost, Plan


@dataclass
class StageTraffic:
    """What is on its way between the ranks of a pipeline.

    Attributes:
        ranks: no other one is waited for.
        sent: when each message arrives, by sender and receiver, in order.
        met: when each rank has come to a collective, by the ranks that take part and its number among theirs.
    """

    ranks: frozenset[int]
    sent: defaultdict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    met: defaultdict[tuple[tuple[int, ...], int], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))


@dataclass
class StageTimeline:
    """One rank along the pipeline.

    Attributes:
        events: what it does.
        rank: its number in the run.
        clock: seconds since the update began.
        busy: seconds of computing.
        num_done: events that it has done.
    """

    events: Sequence[PlanEvent]
    rank: int
    clock: float = 0.0
    busy: float = 0.0
    num_done: int = 0

    def run(self, traffic: StageTraffic, seconds: Callable[[PlanEvent], float]) -> Iterator[bool]:
        """Do all of it; yields True where it has to wait for what others have not done yet."""
        num_met: Counter[tuple[int, ...]] = Counter()
        for event in self.events:
            if event.kind == "compute":
                self.clock += seconds(event)
                self.busy += seconds(event)
            elif event.kind == "send":  # it goes on meanwhile
                traffic.sent[self.rank, event.ranks[0]].append(self.clock + seconds(event))
            elif event.kind == "recv":
                arriving = traffic.sent[event.ranks[0], self.rank]
                while not arriving:
                    yield True
                self.clock = max(self.clock, arriving.popleft())
            else:
                come = traffic.met[event.ranks, num_met[event.ranks]]
                come[self.rank] = self.clock
                while not come.keys() >= traffic.ranks & set(event.ranks):
                    yield True
                num_met[event.ranks] += 1
                self.clock = max(come.values()) + seconds(event)
            self.num_done += 1


def simulate(lanes: Sequence[StageTimeline], seconds: Callable[[PlanEvent], float]) -> float:
    """Let all ranks do what they do; returns when the last one is done.

    Args:
        lanes: the ranks.
        seconds: how long an event takes by itself.

    Raises:
        StateError: ranks wait for each other for ever.
    """
    traffic = StageTraffic(frozenset(lane.rank for lane in lanes))
    running = [lane.run(traffic, seconds) for lane in lanes]
    while running:
        before = sum(lane.num_done for lane in lanes)
        running = [run for run in running if next(run, False)]
        if running and sum(lane.num_done for lane in lanes) == before:
            raise StateError("the ranks of a pipeline wait for each other in the order of their sends and receives")
    return max(lane.clock for lane in lanes)


_IN_THE_WAY = frozenset({"tp", "cp", "ep", "pp"})
"""Axes whose exchanges computing waits for; those of the others run beside it."""


@dataclass(frozen=True)
class ClusterRates:
    """The machines of a run.

    Attributes:
        machine_ranks: ranks on one machine.
        intra: bytes a second that a rank sends to others of its machine.
        inter: bytes a second that a rank's own network card sends to other machines.
        flops: a second and rank, as they are reached, not as they are advertised.
        memory: bytes of a device; None: no limit.
    """

    machine_ranks: int = 8
    intra: float = 300e9
    inter: float = 40e9
    flops: float = 400e12
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.machine_ranks < 1 or min(self.intra, self.inter, self.flops) <= 0:
            raise ConfigError(
                f"a cluster of machine_ranks={self.machine_ranks}, intra={self.intra:g}, inter={self.inter:g} and "
                f"flops={self.flops:g}; all of them must be above 0"
            )

    def is_within_machine(self, axis: str, layout: Layout) -> bool:
        """Do the groups along this axis lie on one machine each?"""
        along = list(_along(axis, layout))
        span = sum((size - 1) * stride for size, stride in along)
        block = max((size * stride for size, stride in along), default=1)
        return span < self.machine_ranks and (self.machine_ranks % block == 0 or layout.num_ranks <= self.machine_ranks)

    def rate(self, axis: str, layout: Layout) -> float:
        """Bytes a second that a rank sends along this axis.

        NCCL runs a ring through each network card of a group's ranks on a machine: eight ranks side by side send eight times what
        one of them could, up to what the links within the machine carry; a rank whose group is elsewhere has its own card only.
        """
        if self.is_within_machine(axis, layout):
            return self.intra
        side_by_side = prod(max(1, min(size, self.machine_ranks // stride)) for size, stride in _along(axis, layout))
        return self.inter if side_by_side == 1 else min(self.intra, self.inter * side_by_side)


def _along(axis: str, layout: Layout) -> Iterator[tuple[int, int]]:
    """(size, ranks from one place to the next) of each of the axes that are named; of all axes where the layout has none of these."""
    named = set(axis.replace("_", "x").split("x")) & layout.sizes.keys() or set(layout.sizes)
    stride = layout.num_ranks
    for name, size in layout.sizes.items():
        stride //= size
        if name in named:
            yield size, stride


def cost(plan: Plan, cluster: ClusterRates) -> Cost | None:
    """None where no step was planned."""
    if plan.exchanges is None or plan.flops is None:
        return None
    compute = plan.flops / cluster.flops
    by_axis: dict[str, float] = {}
    links = {True: 0.0, False: 0.0}
    waiting = compute
    for exchange, volume in plan.exchanges.items():
        seconds = exchange.sent(volume.num_bytes) / cluster.rate(exchange.axis, plan.layout)
        by_axis[exchange.axis] = by_axis.get(exchange.axis, 0.0) + seconds
        if _IN_THE_WAY & set(exchange.axis.split("x")):
            waiting += seconds
        else:
            links[cluster.is_within_machine(exchange.axis, plan.layout)] += seconds
    seconds = max(waiting, *links.values())
    bubble = 0.0
    candidates = {"compute": compute, **by_axis}
    if plan.stages:
        seconds = _in_stages(plan, cluster)
        bubble = max(0.0, seconds - compute - sum(by_axis.values()))
        candidates["bubble"] = bubble
    bottleneck = max(candidates, key=lambda name: candidates[name])
    units = plan.layout.num_data_shards * (plan.tokens or 1)
    rate = units / seconds if seconds else 0.0
    return Cost(
        compute, by_axis, seconds, bottleneck, rate if plan.tokens else 0.0, plan.num_ranks * seconds / units, bubble
    )


def _in_stages(plan: Plan, cluster: ClusterRates) -> float:
    """Seconds of an update of a pipeline, whose exchanges nothing overlaps but the sending of what others wait for."""
    rates = {axis: cluster.rate(axis, plan.layout) for axis in plan.layout.sizes}

    def seconds(event: PlanEvent) -> float:
        rate = cluster.flops if event.kind == "compute" else rates.get(event.axis, cluster.inter)
        return event.amount / rate

    return simulate([StageTimeline(stage.events, stage.share.rank) for stage in plan.stages], seconds)
