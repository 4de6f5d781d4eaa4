"""How long an update takes at least, for given rates of devices and links, and what it waits for.

Of a pipeline, what each of its ranks does is gone through in order, with the waiting for the others.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.config.mesh import Layout
from headway.errors import ConfigError, StateError
from headway.planning.dry_run.meter import PlanEvent
from headway.planning.outcome import Plan


class StageTimeline:
    """One rank along the pipeline.

    Args:
        events: what it does.
        rank: its number in the run.

    Attributes:
        clock: seconds since the update began.
        busy: seconds of computing.
    """

    def __init__(self, events: Sequence[PlanEvent], rank: int) -> None:
        self._left = deque(events)
        self.rank = rank
        self.clock = self.busy = 0.0
        self._num_met: dict[tuple[int, ...], int] = defaultdict(int)

    @property
    def is_done(self) -> bool:
        """Has it done all?"""
        return not self._left

    def go_on(self, traffic: "StageTraffic", seconds: Callable[[PlanEvent], float]) -> bool:
        """Do what can be done without waiting for what others have not done yet; returns whether that was anything."""
        num_left = len(self._left)
        while self._left and self._do(self._left[0], traffic, seconds):
            self._left.popleft()
        return len(self._left) < num_left

    def _do(self, event: PlanEvent, traffic: "StageTraffic", seconds: Callable[[PlanEvent], float]) -> bool:
        if event.kind == "compute":
            self.clock += seconds(event)
            self.busy += seconds(event)
        elif event.kind == "send":  # it goes on meanwhile
            traffic.sent[self.rank, event.ranks[0]].append(self.clock + seconds(event))
        elif event.kind == "recv":
            arriving = traffic.sent[event.ranks[0], self.rank]
            if not arriving:
                return False
            self.clock = max(self.clock, arriving.popleft())
        else:
            begun = traffic.meet(event, self.rank, self._num_met[event.ranks], self.clock)
            if begun is None:
                return False
            self._num_met[event.ranks] += 1
            self.clock = begun + seconds(event)
        return True


class StageTraffic:
    """What is on its way between ranks.

    Args:
        ranks: of the pipeline: no other one is waited for.

    Attributes:
        sent: when each message arrives, by sender and receiver, in order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self.sent: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)
        self._met: defaultdict[tuple[tuple[int, ...], int], dict[int, float]] = defaultdict(dict)

    def meet(self, event: PlanEvent, rank: int, number: int, clock: float) -> float | None:
        """When all ranks have come to this collective; None: one has not."""
        come = self._met[event.ranks, number]
        come.setdefault(rank, clock)
        return max(come.values()) if come.keys() >= self._ranks & set(event.ranks) else None


def simulate(lanes: Sequence[StageTimeline], seconds: Callable[[PlanEvent], float]) -> float:
    """Let all ranks do what they do; returns when the last one is done.

    Args:
        lanes: the ranks.
        seconds: how long an event takes by itself.

    Raises:
        StateError: ranks wait for each other for ever.
    """
    traffic = StageTraffic([lane.rank for lane in lanes])
    while not all(lane.is_done for lane in lanes):
        if not any(lane.go_on(traffic, seconds) for lane in lanes):
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
        axes = self._named(axis, layout)
        stride, span, block = layout.num_ranks, 0, 1
        for name, size in layout.sizes.items():
            stride //= size
            if name in axes:
                span += (size - 1) * stride
                block = max(block, size * stride)
        return span < self.machine_ranks and (self.machine_ranks % block == 0 or layout.num_ranks <= self.machine_ranks)

    def rate(self, axis: str, layout: Layout) -> float:
        """Bytes a second that a rank sends along this axis.

        NCCL runs a ring through each network card of a group's ranks on a machine: eight ranks side by side send eight times what
        one of them could, up to what the links within the machine carry; a rank whose group is elsewhere has its own card only.
        """
        if self.is_within_machine(axis, layout):
            return self.intra
        stride, side_by_side = layout.num_ranks, 1
        for name, size in layout.sizes.items():
            stride //= size
            if name in self._named(axis, layout):
                side_by_side *= max(1, min(size, self.machine_ranks // stride))
        return self.inter if side_by_side == 1 else min(self.intra, self.inter * side_by_side)

    @staticmethod
    def _named(axis: str, layout: Layout) -> set[str]:
        named = set(axis.replace("_", "x").split("x"))
        return named & layout.sizes.keys() or set(layout.sizes)


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
