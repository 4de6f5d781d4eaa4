"""`UpdateClock`, which counts the updates of a run. The progress of training is measured in updates."""

from dataclasses import dataclass
from typing import Any


@dataclass
class UpdateClock:
    """Counter of a run's updates, made and skipped.

    Attributes:
        num_updates: Number of accumulation windows in which an optimizer stepped. Several optimizers in one window
            count once.
        num_skipped: Number of accumulation windows in which fp16's gradient scaler skipped the optimizer step.
        num_without_weight: Number of accumulation windows in which an optimizer would have stepped, but the total loss
            weight was 0.
    """

    num_updates: int = 0
    num_skipped: int = 0
    num_without_weight: int = 0
    # Numbers of the accumulation windows that were counted last; -1: none.
    _last_window: int = -1
    _last_skipped: int = -1
    _last_without_weight: int = -1

    def count_update(self, window: int) -> None:
        """Count the update of the accumulation window with this number.

        Steps of further optimizers in one window are not counted.
        """
        if window != self._last_window:
            self._last_window = window
            self.num_updates += 1

    def count_skip(self, window: int) -> bool:
        """Count the skipped update of the accumulation window with this number, once per window.

        Returns:
            Whether this was the first skipped step of the window.
        """
        is_first = window != self._last_skipped
        self._last_skipped = window
        self.num_skipped += int(is_first)
        return is_first

    def count_without_weight(self, window: int) -> None:
        """Count the accumulation window with this number, whose loss weight is 0, once for all optimizers."""
        if window != self._last_without_weight:
            self._last_without_weight = window
            self.num_without_weight += 1

    def resume(self, num_updates: int) -> None:
        """Continue the count from `num_updates` updates, because the run continues from a loaded state."""
        self.num_updates = num_updates
        self._last_window = -1
        self._last_skipped = -1
        self._last_without_weight = -1

    def snapshot(self) -> dict[str, Any]:
        """Return the clock's counts, which `restore` needs to undo a batch."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore the clock's counts from a snapshot, which can be restored several times."""
        vars(self).update(snapshot)
