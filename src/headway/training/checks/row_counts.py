"""Rows of batches that no prepared loader counts, on several ranks: each loss weighs 1, however many rows it was taken over."""

from typing import Any

import torch

from headway.log import get_logger
from headway.runtime.collectives.tree import find_batch_size
from headway.training.windows import AccumulationWindows

log = get_logger(__name__)

_WORDS = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)


class RowCountCheck:
    """Looks at the first dimension of what models are called with; it guesses no weight from that, it tells.

    Args:
        windows: of the run; what a prepared loader counts is not looked at.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._seen: set[int] = set()
        self._first: set[int] = set()
        self._num_rows = 0
        self._is_told = False

    def see(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A prepared model is called."""
        if self._windows.loader is None and torch.is_grad_enabled() and model.training:
            self._seen.add(find_batch_size((args, kwargs)) or 0)

    def unweighed(self) -> None:
        """A loss weighs 1. Where this rank's batches change, others' may not; where all ranks' always differ, `take` shows it."""
        seen, self._seen = self._seen, set()
        if not seen:
            return
        self._num_rows = sum(seen)
        self._first = self._first or seen
        if seen != self._first and not self._is_told:
            now, before = (", ".join(map(str, sorted(rows))) for rows in (seen, self._first))
            log.warning(_WORDS, f"a batch of this rank has {now} rows, earlier ones {before}", main_process_only=False)
            self._is_told = True

    def take(self) -> int:
        """The rows that the last loss was computed from, if it weighs 1."""
        found, self._num_rows = self._num_rows, 0
        return found

    def place(self) -> int:
        """How many samples of its pass the loader in iteration has given."""
        return 0 if self._windows.loader is None else self._windows.loader.num_consumed

    def tell(self, counts: list[int]) -> None:
        """The ranks' batches differ."""
        if not self._is_told:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_WORDS, f"batches have different numbers of rows ({told})")
            self._is_told = True
