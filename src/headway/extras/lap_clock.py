"""Clock of the training loop: its duration, the time spent waiting for data, and the number of processed samples.

The loop's time is divided into laps. A lap is the time from one request for a batch to the next::

    fetch ------ fetched ------- backward ---- ... step, logging ... ---- fetch
      | waiting for data | forward |                                       |
      +----------------- a lap, counted if a backward ran -----------------+

Passes without a backward (evaluation) belong to no lap. If a batch is not from a prepared loader, its lap is the time
from its backward to the next backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.data.loader import PreparedLoader


@dataclass
class _Lap:
    """Current lap. Times are those of the clock, in seconds.

    Attributes:
        loader: Loader of the last requested batch. None before the first request.
        request_time: Time of the request.
        arrival_time: Time at which the batch arrived.
        arrival_event: Event that the device reaches once it has finished the work before the arrival. None on a CPU.
        has_batch: Whether the requested batch has arrived.
        has_backward: Whether a backward has run. Only then the lap counts.
        start: Time from which the lap counts, if it does.
    """

    loader: PreparedLoader | None = None
    request_time: float = 0.0
    arrival_time: float = 0.0
    arrival_event: Any = None
    has_batch: bool = False
    has_backward: bool = False
    start: float = 0.0


class LapClock:
    """Clock that measures the laps of a training loop. The host never waits for a device.

    A lap is the time from one request for a batch to the next, and counts if a backward ran in it. The hooks of the loop
    call the methods named `record_...`.

    Args:
        now: Function that returns the time in seconds.
        device: Device of this process.
        active_loaders: Loaders that are being read, the innermost one last.

    Attributes:
        now: Function that returns the time in seconds.
        waited: Total time in seconds that this rank waited for data in counted laps.
        num_samples: Number of samples of counted laps, on all ranks.
    """

    def __init__(
        self, now: Callable[[], float], device: torch.device, active_loaders: Sequence[PreparedLoader]
    ) -> None:
        self.now = now
        self.waited = 0.0
        self.num_samples = 0.0
        self._device = device
        self._active_loaders = active_loaders
        self._finished_seconds = 0.0
        self._lap = _Lap()

    @property
    def seconds(self) -> float:
        """Total duration of the counted laps in seconds, including the current lap so far, without pauses."""
        lap = self._lap
        return self._finished_seconds + (self.now() - lap.start if lap.has_backward else 0.0)

    @property
    def has_backward(self) -> bool:
        """Whether the current lap contains a backward, so that it counts."""
        return self._lap.has_backward

    @property
    def has_counted_batch(self) -> bool:
        """Whether the current lap contains a backward and a batch of a prepared loader."""
        return self._lap.has_backward and self._lap.has_batch

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the last batch on this rank, or None if no prepared loader was read."""
        return None if self._lap.loader is None else self._lap.loader.num_rows

    def record_request(self, loader: PreparedLoader, now: float) -> None:
        """Record the time at which a batch was requested. Call it only after the previous lap was ended.

        Args:
            loader: Loader that returns the batch.
            now: Current time in seconds.
        """
        self._lap.loader, self._lap.request_time, self._lap.has_batch = loader, now, False

    def postpone_request(self) -> None:
        """Move the time of the request to the current time, so that the time since the request does not count."""
        self._lap.request_time = self.now()

    def record_arrival(self) -> None:
        """Record the time at which the requested batch has arrived."""
        self._lap.arrival_time, self._lap.has_batch = self.now(), True
        if self._device.type != "cpu":
            self._lap.arrival_event = self._record_event()

    def drop_batch(self) -> None:
        """Record that the pass over the loader has ended, so that a later backward does not belong to its last batch."""
        self._lap.has_batch = False

    def record_backward(self, now: float, times_forward: bool) -> float | tuple[Any, Any] | None:
        """Record the first backward of a lap: from now on, the lap counts.

        If its batch is from a prepared loader, the lap began with the request, and the batch's samples are counted.

        Args:
            now: Current time in seconds.
            times_forward: Whether to return the time of the forward.

        Returns:
            Time of the batch's forward, in seconds, or on an accelerator as a pair of events at its begin and end. None
            if it is not timed, or if the batch is not from a prepared loader.
        """
        lap, active = self._lap, self._active_loaders
        lap.has_backward = True
        if not lap.has_batch or lap.loader is None or not active or active[-1] is not lap.loader:
            lap.start = now
            return None
        lap.start = lap.request_time
        self.waited += lap.arrival_time - lap.request_time
        self.num_samples += lap.loader.num_consumed - lap.loader.num_consumed_before
        if not times_forward:
            return None
        if lap.arrival_event is None:
            return now - lap.arrival_time
        return lap.arrival_event, self._record_event()

    def end_lap(self, now: float) -> None:
        """Add the duration of the current lap to the measured time, if the lap counts.

        Args:
            now: Current time in seconds.
        """
        if self._lap.has_backward:
            self._finished_seconds += now - self._lap.start
            self._lap.has_backward = False

    def resume(self, begin_time: float, has_backward: bool) -> None:
        """Continue the lap after a pause, whose duration does not count.

        Args:
            begin_time: Time at which the pause began, when the lap was ended.
            has_backward: Whether the lap contained a backward before the pause.
        """
        now = self.now()
        # Shift the start of a lap that is not counted yet by the length of the pause.
        self._lap.request_time += now - begin_time
        self._lap.arrival_time += now - begin_time
        self._lap.start, self._lap.has_backward = now, has_backward

    def _record_event(self) -> Any:
        """Return an event that the device reaches once it has finished the work queued so far."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event
