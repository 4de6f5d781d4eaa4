"""Count the FLOPs of one training batch with torch.utils.flop_counter."""

from typing import Any

from headway.extras._torch import get_current_dispatch_mode


class FlopCount:
    """Count of the FLOPs of one training batch on this rank. A batch without a backward is not used.

    Attributes:
        is_requested: Whether the next batch is to be counted.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._counter: Any = None
        self._is_invalid = False

    @property
    def is_running(self) -> bool:
        """Whether operations are being counted."""
        return self._counter is not None

    def start(self) -> None:
        """Start to count the operations of a batch."""
        from torch.utils.flop_counter import FlopCounterMode

        self.is_requested = False
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def finish(self, is_usable: bool) -> int | None:
        """Stop counting at the end of a batch, and return the number of FLOPs. Call it only while `is_running` is True.

        If a dispatch mode that the caller entered later is still active, counting continues until a later call, and
        that count is discarded.

        Args:
            is_usable: Whether the batch had a backward pass and is from a prepared loader.

        Returns:
            FLOPs of the batch on this rank. None if counting continues or the count was discarded. After a discarded
            count, `is_requested` is True, so that another batch is counted.
        """
        if get_current_dispatch_mode() is not self._counter.mode:
            # The caller's own dispatch mode must end first. Until then, other batches are counted, too.
            self._is_invalid = True
            return None
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        if self._is_invalid or not is_usable:
            self._is_invalid, self.is_requested = False, True
            return None
        return int(counter.get_total_flops())
