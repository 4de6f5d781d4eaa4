"""Check of a training run for data or losses from which no update is made, so that a run with `max_steps` ends."""

from collections.abc import Collection, Mapping

from headway.core.training.update_clock import UpdateClock
from headway.errors import DataError, StateError
from headway.trainer.collation import NUM_ITEMS, SOURCES
from headway.trainer.data import Batch

_MAX_IN_ROW = 1000
"""Largest number of accumulation windows without an update in a row.

Data with few labels can have some such windows. A stream may never end, so the end of its epoch cannot be awaited.
"""


class MissingUpdates:
    """Counter of the accumulation windows that made no update. It raises an error if none of them can be expected to.

    All ranks count the same windows, so all of them raise the error at the same batch.

    Args:
        clock: Clock of the run, which counts the windows without weight.
        label_names: Names of the label columns.
    """

    def __init__(self, clock: UpdateClock, label_names: Collection[str]) -> None:
        self._clock = clock
        self._label_names = {"labels", "shift_labels", *label_names}
        self._num_in_row = 0  # windows since the last update
        self._num_earlier = clock.num_without_weight  # windows without weight, up to the last update
        self._has_updated = False  # whether any window of this run has made an update
        self._columns: list[str] | None = None  # of the last batch; None: it has no named columns

    def record_update(self) -> None:
        """Record that an accumulation window has made an update."""
        self._has_updated = True
        self._num_in_row = 0
        self._num_earlier = self._clock.num_without_weight

    @property
    def _is_without_weight(self) -> bool:
        """Whether all windows since the last update had weight 0, because none of their labels counts."""
        return self._clock.num_without_weight - self._num_earlier == self._num_in_row

    def record_missing_update(self, batch: Batch) -> None:
        """Record that an accumulation window has ended without an update.

        Args:
            batch: Last batch of the window.

        Raises:
            DataError: If the losses of the last 1000 windows had weight 0.
            StateError: If there was no update in the last 1000 windows for another reason.
        """
        self._num_in_row += 1
        self._columns = list(map(str, batch)) if isinstance(batch, Mapping) else None
        if self._num_in_row < _MAX_IN_ROW:
            return
        if self._is_without_weight:
            raise DataError(self._describe_labels(f"the last {self._num_in_row} accumulation windows"))
        raise StateError(
            f"the last {self._num_in_row} accumulation windows made no update, so the training stops: each of them was "
            "skipped by fp16's gradient scaler, refused by a guard (on_non_finite, on_spike), had no label that counts, or never "
            "called accelerator.backward(). The log shows which; on_non_finite='explain' finds where a value became NaN or infinite"
        )

    def check_epoch(self) -> None:
        """Raise an error if no accumulation window of the run has made an update so far, because no label counts.

        Called at the end of a complete epoch. A window without a label that counts has weight 0.

        Raises:
            DataError: If there were accumulation windows, and all of them had weight 0.
        """
        if not self._has_updated and self._num_in_row and self._is_without_weight:
            raise DataError(self._describe_labels(f"all {self._num_in_row} accumulation windows so far"))

    def _describe_labels(self, windows: str) -> str:
        """Return the error message for losses without weight.

        Args:
            windows: The windows concerned, such as "the last 1000 accumulation windows".
        """
        columns = self._columns or []
        labels = [name for name in columns if name in self._label_names]
        if NUM_ITEMS in columns and labels:
            others = [name for name in columns if name not in (NUM_ITEMS, SOURCES, *labels)]
            label_text = " and ".join(map(repr, labels))
            finding = f"in {windows}, {label_text} contained only -100 (other columns: {', '.join(others)})"
        else:
            finding = f"in {windows}, every loss was given weight 0 (columns: {', '.join(columns) or 'none'})"
        return (
            f"no label of the training data counts: {finding}. A loss over no label makes no update. Likely causes: rows are "
            "truncated before the tokens to be learned, the chat template marks no assistant tokens ({% generation %}), or "
            "the response template that masks the prompts does not occur in the rows. A causal model does not learn the "
            "first label of a row, so that one does not count. Print the labels of one row (docs/trainer.md)"
        )
