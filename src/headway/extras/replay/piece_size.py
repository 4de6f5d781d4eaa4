"""Limit on the rows of a micro-batch ("piece"): it shrinks when memory runs out, and grows back when memory is free.

The limit is equal on all ranks, because it changes only when all ranks exchange whether their batch has succeeded (a
vote). `AllocatorPressure` predicts how many rows fit into a device's memory. On the CPU, sizes are not predicted.

If the allocator counts memory, a failure is followed by a calibration. During a calibration, batches are split into
micro-batches of two sizes, and the peak memory of each micro-batch is read. Each rank fits a line through both peaks to
predict the largest size that fits. The smallest prediction of all ranks is tried next, and its peak is measured too.
"""

from dataclasses import dataclass

from headway.core.runtime.collectives.tree import compute_slice_bounds

FIRST_PATIENCE = 16
"""Number of batches without an error before a larger size is first tried."""
_MAX_PATIENCE = 4096
"""Largest number of batches without an error before a larger size is tried, however often larger sizes have failed."""
_CALIBRATION_UPDATES = 2
"""Number of updates, after a failure, in which memory is measured before a larger size is predicted.

The first update creates optimizer state, so only the second one shows the memory that later updates need.
"""
_FIRST_SHRINK_FACTOR = 4
"""Factor by which micro-batches shrink after a failure if the size that fits will soon be predicted.

The factor is large, because each failed size costs a replay and growing back costs nothing.
"""


@dataclass
class PieceSize:
    """Adaptive limit on the rows of a micro-batch. It shrinks after out-of-memory errors, and grows again later.

    After `patience` batches without an error, a larger limit is tried:

    - If memory is measured, it is the largest limit that is predicted to fit. No larger limit is tried if it would not
      reduce the number of micro-batches.
    - If memory is not measured, the limit is doubled. If the doubled limit has failed before, the midpoint between the
      current limit and the failed one is tried first.

    If the larger limit fails, the previous limit is restored and `patience` doubles. `patience` starts at 16, so n
    batches see at most about log2(n / 16) failures. If memory is measured, the first failure starts a calibration: the
    peak memory of micro-batches is measured to predict the limit.

    Attributes:
        limit: Largest number of rows per micro-batch. None: do not split batches.
        failed: Smallest number of rows that has failed and has not been tried since. None: none has failed.
        good: Previous limit, which is restored if the current, larger one fails. None: the current one is not a trial.
        patience: Number of batches without an error before a larger limit is tried. During a calibration, a number of
            updates.
        num_clean: Number of batches without an error since the limit changed. During a calibration, a number of
            updates.
    """

    limit: int | None = None
    failed: int | None = None
    good: int | None = None
    patience: int = FIRST_PATIENCE
    num_clean: int = 0

    @property
    def is_calibrating(self) -> bool:
        """Whether the peak memory of each micro-batch is measured, so that a larger limit can soon be predicted."""
        return self.limit is not None and self.patience < FIRST_PATIENCE

    @property
    def has_two_sizes(self) -> bool:
        """Whether each batch is cut into micro-batches of two sizes, because only one size has been measured so far."""
        return self.is_calibrating and self.good is None

    def is_try_due(self, is_update: bool) -> bool:
        """Whether it is time to try a larger number of rows per micro-batch after the current batch.

        Args:
            is_update: Whether the batch ends with an optimizer update.
        """
        is_counted = is_update or not self.is_calibrating  # a calibration counts only updates
        return self.limit is not None and is_counted and self.num_clean + 1 >= self.patience

    def count_pieces(self, num_rows: int) -> int:
        """Return the number of micro-batches for a batch of `num_rows` rows.

        This is the smallest number with which no micro-batch has more rows than `limit`. While memory is measured with
        micro-batches of two sizes, the number is one higher.
        """
        if self.limit is None or num_rows <= self.limit:
            return 1
        num_pieces = _divide_rounding_up(num_rows, self.limit)
        return num_pieces + 1 if self.has_two_sizes else num_pieces

    def split_rows(self, num_rows: int, min_pieces: int = 1) -> list[tuple[int, int]]:
        """Return the (begin, end) row indices of a batch's micro-batches.

        Their sizes differ by at most one. If a measurement needs two different sizes, one micro-batch is halved.

        Args:
            num_rows: Number of rows in the batch.
            min_pieces: Minimum number of micro-batches, such as the number that another rank needs. A batch with fewer
                rows gets one per row. Default: 1.
        """
        count = min(max(self.count_pieces(num_rows), min_pieces), max(num_rows, 1))
        if self.has_two_sizes and count > 2:
            larger_ranges = [compute_slice_bounds(num_rows, count - 1, index) for index in range(count - 1)]
            ranges = _halve_a_piece(larger_ranges)
            if ranges:
                return ranges
        return [compute_slice_bounds(num_rows, count, index) for index in range(count)]

    def get_smaller_size(self, num_rows: int, is_measured: bool = False) -> int:
        """Return the next smaller number of rows per micro-batch after an out-of-memory error, or 0 if there is none.

        If the failed size was only on trial, this is the limit before it. Otherwise it is half of the failed size. After
        the first failure it is a quarter if memory is measured, because a larger size will soon be predicted.

        Args:
            num_rows: Rows of the micro-batches that failed.
            is_measured: Whether memory is measured, so that the size that fits can soon be predicted. Default: False.
        """
        if self.good is not None and self.good < num_rows:
            return self.good
        if num_rows <= 1:
            return 0
        is_first_failure = self.patience <= FIRST_PATIENCE
        factor = _FIRST_SHRINK_FACTOR if is_measured and is_first_failure else 2
        return _divide_rounding_up(num_rows, factor)

    def restore_fields(self, **fields: int | None) -> None:
        """Set fields of this object, by name, to the values that a checkpoint has saved."""
        vars(self).update(fields)

    def shrink(self, limit: int, num_rows: int, is_measured: bool = False) -> None:
        """Lower the largest number of rows of a micro-batch, after micro-batches of `num_rows` rows ran out of memory.

        Args:
            limit: New largest number of rows, equal on all ranks.
            num_rows: Rows of the micro-batches that ran out of memory.
            is_measured: Whether memory is measured on all ranks, so that the size that fits can soon be predicted.
                Default: False.
        """
        if self.good is not None:
            self.patience = min(2 * max(self.patience, FIRST_PATIENCE), _MAX_PATIENCE)
        elif is_measured and self.patience <= FIRST_PATIENCE:
            self.patience = _CALIBRATION_UPDATES
        self.limit, self.failed, self.good, self.num_clean = limit, num_rows, None, 0

    def record_success(
        self, num_rows: int, predicted_rows: int | None = None, batch_rows: int = 0, is_update: bool = True
    ) -> None:
        """Record a batch that succeeded, and try a larger limit if that is due.

        Args:
            num_rows: Rows of the batch's largest micro-batch.
            predicted_rows: Largest number of rows that is predicted to fit on all ranks. None: memory is not measured.
            batch_rows: Rows of the largest batch of all ranks. Needed if memory is measured. Default: 0.
            is_update: Whether the batch ended with an optimizer update. Default: True.
        """
        # Pieces of a split batch have more than half of the limit's rows. Shorter ones come from unsplit batches.
        if self.limit is None or 2 * num_rows <= self.limit:
            return
        if not self.is_try_due(is_update):
            if is_update or not self.is_calibrating:  # a calibration counts only updates
                self.num_clean += 1
            return
        self.num_clean = 0
        if predicted_rows is None:
            next_limit = self.get_next_limit()
        else:
            next_limit = self._choose_limit(predicted_rows, batch_rows)
        if next_limit <= self.limit:
            self.patience = max(self.patience, FIRST_PATIENCE)  # end the calibration, if there was one
            return
        if self.failed is not None and next_limit >= self.failed:
            self.failed = None  # memory may have become free
        self.good, self.limit = self.limit, next_limit

    def get_next_limit(self) -> int:
        """Return the number of rows per micro-batch to try next if memory is not measured.

        The value has no meaning unless batches are split.
        """
        limit = self.limit or 1
        if self.failed is None or 2 * limit < self.failed:
            return 2 * limit
        middle = (limit + self.failed) // 2
        is_worth_trying = middle - limit > limit // 8
        return middle if is_worth_trying else max(self.failed, limit + 1)

    def _choose_limit(self, predicted_rows: int, batch_rows: int) -> int:
        """Return the number of rows per micro-batch to try next.

        The current size is kept if a larger one would not reduce the number of micro-batches.

        Args:
            predicted_rows: Largest number of rows that is predicted to fit into memory.
            batch_rows: Rows of the whole batch.
        """
        limit = self.limit or 1
        if self.failed is not None and predicted_rows >= self.failed:
            # Sizes below the one that failed come first. If a prediction has failed before, they are bisected.
            has_failed_before = self.patience > FIRST_PATIENCE
            max_rows = (limit + self.failed) // 2 if has_failed_before else self.failed - 1
            balanced = _balance_pieces(max_rows, batch_rows)
            if balanced > limit:
                return balanced
        return _balance_pieces(predicted_rows, batch_rows)


def _divide_rounding_up(number: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-number // divisor)


def _halve_a_piece(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the row ranges of micro-batches after one of them is halved.

    Return an empty list if the micro-batch to halve has a single row. Large micro-batches run first where possible,
    because small ones can reuse their memory blocks. The first micro-batch to run cannot be measured, because gradients
    do not exist yet. If there are only two, the first one is therefore halved, and its second half is moved to the end.
    A micro-batch of each size is then measured.

    Args:
        ranges: Row ranges (begin, end) of at least two micro-batches.
    """
    if len(ranges) == 2:
        (_, first_end), (_, end) = ranges  # the first one begins at row 0
        half, large = first_end // 2, end - first_end
        return [(0, half), (half, half + large), (half + large, end)] if half else []
    *unchanged, (begin, end) = ranges
    middle = (begin + end + 1) // 2
    return [*unchanged, (begin, middle), (middle, end)] if middle < end else []


def _balance_pieces(max_rows: int, num_rows: int) -> int:
    """Return the number of rows in the largest micro-batch if a batch is split evenly.

    The batch is split into the smallest number of micro-batches that have at most `max_rows` rows each.
    """
    num_pieces = _divide_rounding_up(num_rows, max(max_rows, 1))
    return _divide_rounding_up(num_rows, max(num_pieces, 1))
