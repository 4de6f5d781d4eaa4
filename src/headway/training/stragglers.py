"""Ranks that hold up the others: each tells its pace now and then, and the main process names who is slow."""

import struct
from dataclasses import dataclass
from datetime import timedelta
from statistics import median_low
from typing import Any

from torch.distributed import DistError

from headway.errors import ControlPlaneError, LaunchError
from headway.log import get_logger
from headway.runtime.control_plane import control
from headway.runtime.events import notify
from headway.runtime.process import ProcessRuntime

log = get_logger(__name__)

_PACE = struct.Struct("<qdd")
_NUM_FORWARDS = 64  # of which the median is told
_WAITS_MORE = 0.1


@dataclass(frozen=True)
class RankPace:
    """How fast a rank is by itself, apart from waiting for the others.

    Attributes:
        rank: its number.
        num_updates: when it told.
        forward: seconds of a forward pass, the median of its latest ones: nothing in it waits for another rank.
        data_wait: the share of its time, 0 to 1, that it waited for data.
    """

    rank: int
    num_updates: int
    forward: float
    data_wait: float


class RankPaces:
    """What the ranks tell each other of their paces, over the control plane; no rank waits for another here.

    Args:
        runtime: this process.
        num_updates: from which the first word is due.
    """

    def __init__(self, runtime: ProcessRuntime, num_updates: int) -> None:
        self._runtime = runtime
        self._forwards: list[Any] = []
        self._reported_at = num_updates
        self._reported_seconds = self._reported_wait = 0.0
        self._suspects: set[int] = set()
        self._accused: set[int] = set()
        self._is_broken = False

    def add(self, forward: Any) -> None:
        """A forward took so many seconds, or the time between a pair of the device's events."""
        if len(self._forwards) < _NUM_FORWARDS:
            self._forwards.append(forward)

    @property
    def is_full(self) -> bool:
        """Are enough forwards known until the next word?"""
        return len(self._forwards) >= _NUM_FORWARDS

    def is_due(self, num_updates: int, every: int) -> bool:
        """Is it time for a word, with one every so many updates?"""
        return not (self._is_broken or 0 <= num_updates - self._reported_at < every)  # a resume may go back

    def tell(self, num_updates: int, seconds: float, waited: float, factor: float) -> None:
        """Tell this rank's pace; the main process looks at all, and names who was slow twice in a row.

        Args:
            num_updates: made so far.
            seconds: measured so far.
            waited: of these, for data.
            factor: as for `find_stragglers`.
        """
        seconds_since = seconds - self._reported_seconds
        forwards = [f for f in map(_read_seconds, self._forwards) if f is not None]
        self._reported_at, self._forwards = num_updates, []
        if self._runtime.world_size == 1 or not forwards or seconds_since <= 0:
            return
        wait = (waited - self._reported_wait) / seconds_since
        self._reported_seconds, self._reported_wait = seconds, waited
        try:
            word = _PACE.pack(self._reported_at, median_low(forwards), wait)
            control.current().set(f"pace/{self._runtime.rank}", word)
            slow = find_stragglers(self.latest(), factor) if self._runtime.is_main_process else {}
        except (DistError, ControlPlaneError, LaunchError) as error:
            # Measuring must not end a run.
            log.warning_once("paces of ranks are not compared any more: %s", error)
            self._is_broken = True
            return
        for rank in sorted((self._suspects & set(slow)) - self._accused):
            log.warning("%s (update %d)", slow[rank], self._reported_at)
            notify("straggler", update=self._reported_at, rank=rank, reason=slow[rank])
            self._accused.add(rank)
        self._suspects = set(slow)

    def latest(self) -> list[RankPace]:
        """What each rank told last."""
        found = []
        plane = control.current()
        for rank in range(self._runtime.world_size):
            if plane.has(f"pace/{rank}"):
                number, forward, wait = _PACE.unpack(plane.get(f"pace/{rank}", timedelta(seconds=10)))
                found.append(RankPace(rank, number, forward, wait))
        return found


def _read_seconds(forward: Any) -> float | None:
    """A forward's time; between two events of a device that has not come there yet, None."""
    if isinstance(forward, float):
        return forward
    begin, end = forward
    return float(begin.elapsed_time(end)) / 1000 if end.query() else None


def find_stragglers(paces: list[RankPace], factor: float) -> dict[int, str]:
    """Ranks whose forward takes `factor` times the median, or who wait for data much longer than the median.

    Args:
        paces: of at least two ranks; fewer have no stragglers.
        factor: above 1.
    """
    if len(paces) < 2:
        return {}
    # The lower of two middles: of two ranks, the faster one is the measure.
    usual = median_low(pace.forward for pace in paces)
    waited = median_low(pace.data_wait for pace in paces)
    found = {}
    for pace in paces:
        told = []
        if pace.forward > factor * usual > 0:
            taken = f"{1000 * pace.forward:,.0f}" if pace.forward >= 0.1 else f"{1000 * pace.forward:.3g}"
            told.append(f"takes {taken} ms for a forward, {pace.forward / usual:.1f} times the median")
        if pace.data_wait > waited + _WAITS_MORE:
            told.append(f"waits for data {pace.data_wait:.0%} of its time, the median is {waited:.0%}")
        if told:
            found[pace.rank] = f"rank {pace.rank} holds up the others: it {' and '.join(told)}"
    return found
