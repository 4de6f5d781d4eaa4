"""How long an update of a pipeline takes: what each of its ranks does in order, with the waiting for the others."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from headway.errors import StateError
from headway.planning.dry_run.meter import PlanEvent


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
