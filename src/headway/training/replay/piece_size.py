"""How many rows a piece of a batch may have: shrinks when memory runs out, grows back when there is room.

Every rank holds the same state, because it is only moved by what a vote has told all of them.
"""

from dataclasses import dataclass

from headway.runtime.collectives.partition import slice_bounds

FIRST_PATIENCE = 16
_MOST_PATIENCE = 4096


@dataclass
class PieceSize:
    """The largest piece, and what is known about larger ones.

    Growth tries a size after `patience` clean batches, where there is room by what these took at most: twice the present
    one, or halfway to what failed last, or that itself. A try that fails goes back to the size before it and doubles the
    patience, so n batches see at most about log2(n / 16) failed tries, whatever memory does.

    Attributes:
        limit: rows; None: whole batches.
        failed: the smallest number of rows that failed since it was last tried.
        good: the limit before the try in progress.
        patience: clean batches before the next try.
        num_clean: since the last change.
    """

    limit: int | None = None
    failed: int | None = None
    good: int | None = None
    patience: int = FIRST_PATIENCE
    num_clean: int = 0

    def count(self, num_rows: int) -> int:
        """How many pieces a batch is cut into: as few as the limit allows."""
        return 1 if self.limit is None or num_rows <= self.limit else -(-num_rows // self.limit)

    def cuts(self, num_rows: int, least: int = 1) -> list[tuple[int, int]]:
        """Where the pieces of a batch begin and end, their sizes at most one apart.

        Args:
            num_rows: of the batch.
            least: pieces that it takes at least, where it has so many rows: another rank's batch needs them.
        """
        count = min(max(self.count(num_rows), least), max(num_rows, 1))
        return [slice_bounds(num_rows, count, index) for index in range(count)]

    def below(self, num_rows: int) -> int:
        """The size to go down to where pieces of `num_rows` rows failed; 0: there is none."""
        if self.good is not None and self.good < num_rows:
            return self.good
        return 0 if num_rows <= 1 else (num_rows + 1) // 2

    def go_on(self, **fields: int | None) -> None:
        """Be that of the run which is resumed, by its fields."""
        vars(self).update(fields)

    def shrink(self, limit: int, num_rows: int) -> None:
        """Pieces of `num_rows` rows failed; all ranks go on with `limit`."""
        if self.good is not None:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self.limit, self.failed, self.good, self.num_clean = limit, num_rows, None, 0

    def succeeded(self, num_rows: int, has_room: bool) -> None:
        """A batch whose largest piece had `num_rows` rows went through; `has_room`: all ranks have memory to spare."""
        # Even pieces have more than half of the limit's rows: shorter ones come from batches that it does not cut.
        if self.limit is None or 2 * num_rows <= self.limit:
            return
        self.num_clean += 1
        if self.num_clean < self.patience:
            return
        self.num_clean = 0
        if has_room:
            self.good = self.limit
            self.limit = self._next_limit(self.limit)

    def _next_limit(self, limit: int) -> int:
        if self.failed is None or 2 * limit < self.failed:
            return 2 * limit
        middle = (limit + self.failed) // 2
        if middle - limit > limit // 8:
            return middle
        failed, self.failed = self.failed, None  # the room may have come back
        return max(failed, limit + 1)
