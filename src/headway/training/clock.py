"""The clock: progress is counted in updates that happened, and schedules tick by one of three rules."""

from dataclasses import dataclass
from typing import Protocol


@dataclass
class Clock:
    """How far training is.

    Attributes:
        num_updates: windows whose optimizer stepped; several optimizers that step in one window count as one update.
    """

    num_updates: int = 0
    _last_window: int = -1

    def count(self, window: int) -> None:
        """An optimizer stepped in the window of that number."""
        if window != self._last_window:
            self._last_window = window
            self.num_updates += 1

    def resume(self, num_updates: int) -> None:
        """Go on from so many updates; windows are numbered anew."""
        self.num_updates, self._last_window = num_updates, -1


class TickRule(Protocol):
    """How often a schedule is stepped for one update."""

    @property
    def name(self) -> str:
        """A short name."""

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""

    def ticks(self, window_length: int) -> int:
        """Schedule steps for an update of a window of `window_length` micro-batches."""


@dataclass(frozen=True)
class PerProcessTicks:
    """P ticks per update on P processes: the schedule was written for the single-process loop, stepped once an update.

    That loop makes P times as many updates for the same data.
    """

    num_processes: int
    name: str = "per process"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        ticks = "1 tick" if self.num_processes == 1 else f"{self.num_processes} ticks"
        return f"counted in the updates of the single-process loop: {ticks} an update"

    def ticks(self, window_length: int) -> int:
        """The number of processes."""
        return self.num_processes


@dataclass(frozen=True)
class MicroBatchTicks:
    """P times the window's length: the schedule was counted in the micro-batches of the single-process loop."""

    num_processes: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        return f"counted in single-process micro-batches: {self.num_processes} ticks for each micro-batch of the update"

    def ticks(self, window_length: int) -> int:
        """Processes times the real window."""
        return self.num_processes * window_length


@dataclass(frozen=True)
class KeptTicks:
    """As many ticks as an update had before the run was resumed on another world, with windows of another length.

    Attributes:
        num_ticks: of an update of a full window.
        num_steps: micro-batches of a full window now; a shorter one ticks in proportion, rounded up.
    """

    num_ticks: int
    num_steps: int
    name: str = "micro-batches"

    @property
    def reason(self) -> str:
        """Why it ticks so, for the log."""
        return f"counted in the micro-batches of the run that was resumed: {self.num_ticks} ticks a full update"

    def ticks(self, window_length: int) -> int:
        """In proportion to the window."""
        return -(-self.num_ticks * window_length // self.num_steps)


@dataclass(frozen=True)
class UpdateTicks:
    """One tick per update: the schedule was counted in real updates."""

    name: str = "updates"
    reason: str = "counted in updates: 1 tick an update"

    def ticks(self, window_length: int) -> int:
        """One."""
        return 1
