"""Detection of stragglers: each rank publishes its step times regularly, and the main process names the slow ranks."""

import struct
from datetime import timedelta
from statistics import median_low
from typing import Any

from torch.distributed import DistError

from headway.core.runtime.control_plane import control
from headway.core.runtime.events import notify_listeners
from headway.core.runtime.process import ProcessRuntime
from headway.core.training.interfaces import RankPace
from headway.errors import ControlPlaneError, LaunchError
from headway.log import get_logger

log = get_logger(__name__)

_PACE = struct.Struct("<qdd")
"""Format of a pace on the control plane: number of updates, forward time in seconds, fraction of time waiting for data."""
_NUM_FORWARDS = 64
"""Number of forwards whose median is reported."""
_MAX_EXCESS_WAIT = 0.1
"""Difference to the median fraction of time waiting for data above which a rank is slow."""


class RankPaces:
    """Collection of all ranks' median forward times and fractions of time spent waiting for data, to find slow ranks.

    Each rank publishes its values on the control plane. No rank waits for another.

    Args:
        runtime: Runtime of this process.
        num_updates: Number of updates made so far. The first report is due a fixed number of updates later.

    Attributes:
        latest: Paces of all ranks as of the latest report, on the main process. Empty on other processes.
    """

    def __init__(self, runtime: ProcessRuntime, num_updates: int) -> None:
        self._runtime = runtime
        self._forwards: list[Any] = []
        # As of this rank's last report
        self._reported_at = num_updates
        self._reported_seconds = self._reported_wait = 0.0
        # Ranks that were slow in the last report, and ranks for which a warning was logged
        self._slow_ranks: set[int] = set()
        self._warned_ranks: set[int] = set()
        self._is_broken = False
        self.latest: list[RankPace] = []

    def add_forward(self, forward: Any) -> None:
        """Record the time of a forward for the next report. Do nothing if `is_full`.

        Args:
            forward: Seconds, or a pair of device events at the start and end.
        """
        if len(self._forwards) < _NUM_FORWARDS:
            self._forwards.append(forward)

    @property
    def is_full(self) -> bool:
        """Whether enough forwards have been timed for the next report."""
        return len(self._forwards) >= _NUM_FORWARDS

    def is_due(self, num_updates: int, every: int) -> bool:
        """Whether a report is due.

        Args:
            num_updates: Number of updates made so far.
            every: Number of updates between two reports.
        """
        return not (self._is_broken or 0 <= num_updates - self._reported_at < every)  # a resume may go back

    def publish_pace(self, num_updates: int, seconds: float, waited: float, factor: float) -> None:
        """Publish this rank's median forward time and the fraction of its time spent waiting for data.

        The main process also compares all ranks, and warns once about each rank that was slow twice in a row. Nothing
        is published in a single-process run, or if no forward has been timed since the last report.

        Args:
            num_updates: Number of updates made so far.
            seconds: Seconds measured so far.
            waited: Seconds of these in which this rank waited for data.
            factor: Multiple of the median forward time above which a rank is a straggler.
        """
        seconds_since = seconds - self._reported_seconds
        # Forwards that the device has not finished yet are left out.
        forwards = [duration for duration in map(_read_seconds, self._forwards) if duration is not None]
        self._reported_at, self._forwards = num_updates, []
        if self._runtime.world_size == 1 or not forwards or seconds_since <= 0:
            return
        wait = (waited - self._reported_wait) / seconds_since
        self._reported_seconds, self._reported_wait = seconds, waited
        try:
            pace = _PACE.pack(self._reported_at, median_low(forwards), wait)
            control.current().set(f"pace/{self._runtime.rank}", pace)
            self.latest = self.list_latest() if self._runtime.is_main_process else []
            descriptions = find_stragglers(self.latest, factor) if self.latest else {}
        except (DistError, ControlPlaneError, LaunchError) as error:
            # Measuring must not end a run.
            log.warning_once("the speeds of ranks are no longer compared: %s", error)
            self._is_broken = True
            return
        for rank in sorted((self._slow_ranks & set(descriptions)) - self._warned_ranks):
            log.warning("%s (update %d)", descriptions[rank], self._reported_at)
            notify_listeners("straggler", update=self._reported_at, rank=rank, reason=descriptions[rank])
            self._warned_ranks.add(rank)
        self._slow_ranks = set(descriptions)

    def list_latest(self) -> list[RankPace]:
        """Return the latest pace of each rank that has published one.

        A pace contains the median forward time in seconds, and the fraction of time spent waiting for data.
        """
        paces = []
        control_plane = control.current()
        for rank in range(self._runtime.world_size):
            if control_plane.has_key(f"pace/{rank}"):
                num_updates, forward, wait = _PACE.unpack(control_plane.get(f"pace/{rank}", timedelta(seconds=10)))
                paces.append(RankPace(rank, num_updates, forward, wait))
        return paces


def _read_seconds(forward: Any) -> float | None:
    """Return the time of a forward in seconds, or None if the device has not finished the forward yet."""
    if isinstance(forward, float):
        return forward
    begin, end = forward
    return float(begin.elapsed_time(end)) / 1000 if end.query() else None


def find_stragglers(paces: list[RankPace], factor: float) -> dict[int, str]:
    """Return a description of each slow rank, by rank.

    A rank is slow if its forward takes more than `factor` times the median. It is also slow if the fraction of its time
    spent waiting for data exceeds the median by more than 0.1.

    Args:
        paces: Each rank's forward time, and fraction of time spent waiting for data. With fewer than two ranks there
            are no stragglers.
        factor: Multiple of the median forward time, above 1.
    """
    if len(paces) < 2:
        return {}
    # The lower median: of two ranks, the faster one is the reference.
    median_forward = median_low(pace.forward for pace in paces)
    median_wait = median_low(pace.data_wait for pace in paces)
    stragglers = {}
    for pace in paces:
        reasons = []
        if pace.forward > factor * median_forward > 0:
            milliseconds = f"{1000 * pace.forward:,.0f}" if pace.forward >= 0.1 else f"{1000 * pace.forward:.3g}"
            ratio = pace.forward / median_forward
            reasons.append(f"takes {milliseconds} ms for a forward, {ratio:.1f} times the median")
        if pace.data_wait > median_wait + _MAX_EXCESS_WAIT:
            reasons.append(f"waits for data {pace.data_wait:.0%} of its time, the median is {median_wait:.0%}")
        if reasons:
            stragglers[pace.rank] = f"rank {pace.rank} delays the others: it {' and '.join(reasons)}"
    return stragglers
