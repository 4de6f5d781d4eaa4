"""Check that batches have equally many rows, for loops whose batches do not come from a prepared loader.

Each of their losses has weight 1, so rows of smaller batches would weigh more.
"""

from typing import Any

import torch

from headway.core.runtime.collectives.tree import find_batch_size
from headway.core.training.windows import AccumulationWindows
from headway.log import get_logger

log = get_logger(__name__)

_DIFFERENT_ROW_COUNTS = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)


class RowCountCheck:
    """Check that all batches have equally many rows, for loops whose batches do not come from a prepared loader.

    Each loss of such a loop has weight 1. The check only warns, and derives no weight from the row counts.

    Args:
        windows: Accumulation windows of the run. Batches whose rows a prepared loader counts are not checked.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._current_row_counts: set[int] = set()  # row counts of the model calls since the last loss
        self._first_row_counts: set[int] = set()  # row counts of the model calls before the first loss
        self._num_rows = 0
        self._has_warned = False

    def record_rows(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the number of rows in the inputs of a prepared model's training call, unless a loader counts them.

        Args:
            model: Prepared model.
            args: Positional arguments of its call.
            kwargs: Keyword arguments of its call.
        """
        if self._windows.reads.loader is None and torch.is_grad_enabled() and model.training:
            self._current_row_counts.add(find_batch_size((args, kwargs)) or 0)

    def warn_of_varying_rows(self) -> None:
        """Warn once if a loss has weight 1 although the row counts on this rank vary.

        Called for each loss with weight 1. `ReplicaCheck` finds row counts that are constant on each rank but differ
        between ranks.
        """
        row_counts = self._current_row_counts
        self._current_row_counts = set()
        if not row_counts:
            return
        self._num_rows = sum(row_counts)
        if not self._first_row_counts:
            self._first_row_counts = row_counts
        if row_counts != self._first_row_counts and not self._has_warned:
            own_text = ", ".join(map(str, sorted(row_counts)))
            first_text = ", ".join(map(str, sorted(self._first_row_counts)))
            problem = f"a batch of this rank has {own_text} rows, earlier ones {first_text}"
            log.warning(_DIFFERENT_ROW_COUNTS, problem, main_process_only=False)
            self._has_warned = True

    def pop_row_count(self) -> int:
        """Return the number of rows of the last loss that had weight 1, and reset the number to 0.

        The result is 0 if there was no such loss since the last call.
        """
        num_rows, self._num_rows = self._num_rows, 0
        return num_rows

    def get_position(self) -> int:
        """Return the number of samples that the current loader has returned in this epoch, or 0 without a loader."""
        return 0 if self._windows.reads.loader is None else self._windows.reads.loader.num_consumed

    def warn_of_differences(self, counts: list[int]) -> None:
        """Warn once that the ranks' batches have different row counts.

        Args:
            counts: Row count of each rank.
        """
        if not self._has_warned:
            text = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_DIFFERENT_ROW_COUNTS, f"batches have different numbers of rows ({text})")
            self._has_warned = True
