"""Simulate the ranks of a pipeline in order, including the times when they wait for each other."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.errors import StateError
from headway.planning.dry_run.meter import PlanEvent


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

    def replay_events(self, traffic: StageTraffic, get_seconds: Callable[[PlanEvent], float]) -> Iterator[None]:
        """Simulate all events of the rank. Yield whenever the rank must wait for another rank.

        Args:
            traffic: Messages and collectives of all simulated ranks.
            get_seconds: Function that returns the duration of an event in seconds, not including waits for other ranks.
        """
        num_collectives: Counter[tuple[int, ...]] = Counter()  # by ranks of the group
        for event in self.events:
            if event.kind == "compute":
                self.clock += get_seconds(event)
                self.computing_seconds += get_seconds(event)
            elif event.kind == "send":  # the rank continues while the message is sent
                (receiver,) = event.ranks
                traffic.messages[self.rank, receiver].append(self.clock + get_seconds(event))
            elif event.kind == "recv":
                (sender,) = event.ranks
                arriving = traffic.messages[sender, self.rank]
                while not arriving:
                    yield
                self.clock = max(self.clock, arriving.popleft())
            else:  # a collective starts when the last rank of its group has arrived
                arrival_times = traffic.collectives[event.ranks, num_collectives[event.ranks]]
                arrival_times[self.rank] = self.clock
                while not arrival_times.keys() >= traffic.ranks & set(event.ranks):
                    yield
                num_collectives[event.ranks] += 1
                self.clock = max(arrival_times.values()) + get_seconds(event)
            self.num_done += 1


_FINISHED = object()
"""Marks the end of a rank's events in `simulate_stages`."""


def simulate_stages(timelines: Sequence[StageTimeline], get_seconds: Callable[[PlanEvent], float]) -> float:
    """Simulate all ranks of a pipeline, and return the time in seconds at which the last rank is done.

    Args:
        timelines: Timelines of the ranks to simulate.
        get_seconds: Function that returns the duration of an event in seconds, not including waits for other ranks.

    Raises:
        StateError: If the ranks wait for each other forever.
    """
    traffic = StageTraffic(frozenset(timeline.rank for timeline in timelines))
    running = [timeline.replay_events(traffic, get_seconds) for timeline in timelines]
    while running:
        num_done_before = sum(timeline.num_done for timeline in timelines)
        running = [replay for replay in running if next(replay, _FINISHED) is not _FINISHED]
        if running and sum(timeline.num_done for timeline in timelines) == num_done_before:
            raise StateError("the ranks of a pipeline wait for each other in the order of their sends and receives")
    return max(timeline.clock for timeline in timelines)
