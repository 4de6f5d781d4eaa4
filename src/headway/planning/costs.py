"""Compute a lower bound for the time of an update from the rates of devices and links, and find the bottleneck.

For a pipeline, the events of each rank are simulated in order, including the times when ranks wait for each other.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from headway.core.config.mesh import Layout
from headway.errors import ConfigError, StateError
from headway.planning.dry_run.meter import PlanEvent
from headway.planning.outcome import Cost, Plan

_BLOCKING_AXES = frozenset({"tp", "cp", "ep", "pp"})
"""Axes whose communication blocks the computation. Communication along all other axes overlaps with computation."""
_FINISHED = object()
"""Marks the end of a rank's events in `simulate_stages`."""


@dataclass
class StageTraffic:
    """Messages and collectives between the ranks of a simulated pipeline.

    Times are in seconds since the start of the update.

    Attributes:
        ranks: Simulated ranks. The simulation does not wait for any other rank.
        messages: Arrival times of the messages that are not received yet, in order, by (sender, receiver).
        collectives: For each collective, the times at which ranks reach it, by rank. The key of a collective is a pair of the
            participating ranks and the index of the collective in their group.
    """

    ranks: frozenset[int]
    messages: defaultdict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    collectives: defaultdict[tuple[tuple[int, ...], int], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )


@dataclass
class StageTimeline:
    """State of one rank of a simulated pipeline.

    Attributes:
        events: Events of the rank in order.
        rank: Number of the rank in the whole run.
        clock: Simulated time of the rank, in seconds since the start of the update.
        computing_seconds: Seconds spent computing.
        num_done: Number of events that have been simulated.
    """

    events: Sequence[PlanEvent]
    rank: int
    clock: float = 0.0
    computing_seconds: float = 0.0
    num_done: int = 0

    def replay_events(self, traffic: StageTraffic, seconds: Callable[[PlanEvent], float]) -> Iterator[None]:
        """Simulate all events of the rank. Yield whenever the rank must wait for another rank.

        Args:
            traffic: Messages and collectives of all simulated ranks.
            seconds: Function that returns the duration of an event in seconds, not including waits for other ranks.
        """
        num_collectives: Counter[tuple[int, ...]] = Counter()  # by ranks of the group
        for event in self.events:
            if event.kind == "compute":
                self.clock += seconds(event)
                self.computing_seconds += seconds(event)
            elif event.kind == "send":  # the rank continues while the message is sent
                traffic.messages[self.rank, event.ranks[0]].append(self.clock + seconds(event))
            elif event.kind == "recv":
                arriving = traffic.messages[event.ranks[0], self.rank]
                while not arriving:
                    yield
                self.clock = max(self.clock, arriving.popleft())
            else:
                arrival_times = traffic.collectives[event.ranks, num_collectives[event.ranks]]
                arrival_times[self.rank] = self.clock
                while not arrival_times.keys() >= traffic.ranks & set(event.ranks):
                    yield
                num_collectives[event.ranks] += 1
                self.clock = max(arrival_times.values()) + seconds(event)
            self.num_done += 1


def simulate_stages(lanes: Sequence[StageTimeline], seconds: Callable[[PlanEvent], float]) -> float:
    """Simulate all ranks of a pipeline, and return the time in seconds at which the last rank is done.

    Args:
        lanes: Timelines of the ranks to simulate.
        seconds: Function that returns the duration of an event in seconds, not including waits for other ranks.

    Raises:
        StateError: If the ranks wait for each other forever.
    """
    traffic = StageTraffic(frozenset(lane.rank for lane in lanes))
    running = [lane.replay_events(traffic, seconds) for lane in lanes]
    while running:
        before = sum(lane.num_done for lane in lanes)
        running = [run for run in running if next(run, _FINISHED) is not _FINISHED]
        if running and sum(lane.num_done for lane in lanes) == before:
            raise StateError("the ranks of a pipeline wait for each other in the order of their sends and receives")
    return max(lane.clock for lane in lanes)


@dataclass(frozen=True)
class ClusterRates:
    """Bandwidths, computing rate and memory of the machines of a run.

    Attributes:
        machine_ranks: Ranks per machine.
        intra: Bandwidth in bytes per second at which a rank sends within its machine.
        inter: Bandwidth in bytes per second at which a rank sends to other machines through its own network card.
        flops: Floating point operations per second of each rank, as reached in practice, not the advertised peak.
        memory: Bytes of memory per rank, or None for no limit.

    Raises:
        ConfigError: If any value but `memory` is not above 0.
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
        """Whether every process group along an axis is within a single machine.

        Args:
            axis: Name of an axis, or several names joined by "x" or "_". If the layout has none of them, all axes.
            layout: Layout of the run.
        """
        sizes_and_strides = list(_list_strides(axis, layout))
        # Difference between the highest and the lowest rank of a group.
        span = sum((size - 1) * stride for size, stride in sizes_and_strides)
        if span >= self.machine_ranks:
            return False
        # A group is within a block of this many consecutive ranks. Blocks must not cross the border of a machine.
        block = max((size * stride for size, stride in sizes_and_strides), default=1)
        return self.machine_ranks % block == 0 or layout.num_ranks <= self.machine_ranks

    def get_rate(self, axis: str, layout: Layout) -> float:
        """Return the bandwidth in bytes per second at which a rank sends along an axis of a layout.

        Within a group, NCCL sends through the network cards of all of the group's ranks on a machine. So if eight
        neighboring ranks are in one group, each can send eight times as much as with one card. The result is at most
        the bandwidth of the links within the machine. A rank whose peers are all on other machines has only its own
        card.

        Args:
            axis: Name of an axis, or several names joined by "x" or "_". If the layout has none of them, all axes.
            layout: Layout of the run.
        """
        if self.is_within_machine(axis, layout):
            return self.intra
        ranks_per_machine = prod(  # of one group
            max(1, min(size, self.machine_ranks // stride)) for size, stride in _list_strides(axis, layout)
        )
        return self.inter if ranks_per_machine == 1 else min(self.intra, self.inter * ranks_per_machine)


def _list_strides(axis: str, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield a pair of (size, stride in ranks) for each axis in a name that joins several, such as "shardxtp".

    If the layout has none of the named axes, pairs for all axes of the layout are yielded.
    """
    named = set(axis.replace("_", "x").split("x")) & layout.sizes.keys() or set(layout.sizes)
    stride = layout.num_ranks
    for name, size in layout.sizes.items():
        stride //= size
        if name in named:
            yield size, stride


def compute_cost(plan: Plan, cluster: ClusterRates) -> Cost | None:
    """Return the `Cost` of an update on a cluster, which is a lower bound of its time. None if no step was planned."""
    if plan.exchanges is None or plan.flops is None:
        return None
    compute = plan.flops / cluster.flops
    by_axis: dict[str, float] = {}
    # Communication that overlaps with computation, by whether it stays within machines. The two links work in parallel.
    overlapping = {True: 0.0, False: 0.0}
    sequential = compute  # computation, and the communication that blocks it
    for exchange, volume in plan.exchanges.items():
        seconds = exchange.count_sent_bytes(volume.num_bytes) / cluster.get_rate(exchange.axis, plan.layout)
        by_axis[exchange.axis] = by_axis.get(exchange.axis, 0.0) + seconds
        if _BLOCKING_AXES & set(exchange.axis.split("x")):
            sequential += seconds
        else:
            overlapping[cluster.is_within_machine(exchange.axis, plan.layout)] += seconds
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
    rates = {axis: cluster.get_rate(axis, plan.layout) for axis in plan.layout.sizes}

    def compute_seconds(event: PlanEvent) -> float:
        rate = cluster.flops if event.kind == "compute" else rates.get(event.axis, cluster.inter)
        return event.amount / rate

    return simulate_stages([StageTimeline(stage.events, stage.share.rank) for stage in plan.stages], compute_seconds)
