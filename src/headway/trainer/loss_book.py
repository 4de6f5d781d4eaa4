"""`LossBook`: recorder of a training run's losses and of the other values of its log entries."""

from typing import Any, NamedTuple

import torch

from headway.accelerator import Accelerator
from headway.trainer.source_losses import SourceBook

_MAX_UNREAD_WINDOWS = 512
"""Largest number of accumulation windows whose losses stay on the device until they are read.

Reading losses makes the host wait for the device.
"""


class _WeightedLoss(NamedTuple):
    """Mean loss of a micro-batch.

    Attributes:
        loss: Mean loss, a 0-d tensor on the device.
        weight: Number of samples or labels over which the mean is computed.
        num_rows: Number of rows in the micro-batch.
    """

    loss: torch.Tensor
    weight: float
    num_rows: int


class LossBook:
    """Recorder of a training run's losses, which computes the logged means.

    For each accumulation window, it computes the exact mean over all micro-batches and ranks. It waits for the device
    only when a value is requested, or when the losses of 512 accumulation windows have not been read yet.

    Args:
        accelerator: Accelerator whose ranks compute the losses.

    Attributes:
        source_book: Recorder of the loss of each dataset in a mixture. None: the training data is not a mixture.
        update_values: Values of the newest update that are logged with the loss, by name, such as the learning rate.
        last_logged: Number of updates at the last log entry with a training loss; 0 before the first entry.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # Losses that are still on the device
        self._pieces: list[_WeightedLoss] = []  # of the current batch
        self._window: list[_WeightedLoss] = []  # of the current accumulation window, without the current batch
        self._unread_windows: list[list[_WeightedLoss]] = []  # of windows that have ended
        # Mean losses of accumulation windows over all ranks
        self._recent: list[float] = []  # since the last log entry
        self._total = 0.0  # their sum in the whole run
        self._num_windows = 0  # their number in the whole run
        self.source_book: SourceBook | None = None
        self.update_values: dict[str, torch.Tensor | float] = {}
        self.last_logged = 0

    def add_loss(self, loss: torch.Tensor, weight: float, num_rows: int) -> None:
        """Record the loss of a batch, or of a part of it if the batch was split because memory ran out.

        Args:
            loss: Mean loss of the batch or part.
            weight: Number of samples, or of labels that are not ignored, over which the mean is computed.
            num_rows: Number of rows in the batch or part.
        """
        self._pieces.append(_WeightedLoss(loss.detach(), weight, num_rows))
        if self.source_book is not None:
            self.source_book.end_piece(num_rows)

    def end_batch(self, num_rows: int) -> None:
        """Record that a batch is complete.

        If memory ran out, some rows were run again, so they were recorded twice. Only the last recorded parts are kept,
        as many as are needed for `num_rows` rows.

        Args:
            num_rows: Number of rows in the batch.
        """
        last_pieces, num_counted = [], 0
        for piece in reversed(self._pieces):
            last_pieces.append(piece)
            num_counted += piece.num_rows
            if num_counted >= num_rows:
                break
        self._window += reversed(last_pieces)
        self._pieces.clear()
        if self.source_book is not None:
            self.source_book.end_batch(num_rows)

    def end_window(self) -> None:
        """Record that the accumulation window is complete. Every rank must call it.

        If the losses of 512 windows have not been read yet, read them from the device, which is a collective.
        """
        if self._window:
            self._unread_windows.append(self._window)
            self._window = []
        if len(self._unread_windows) >= _MAX_UNREAD_WINDOWS:
            self._read_losses()

    def _read_losses(self) -> None:
        """Read the recorded losses from the device and reduce them over all ranks.

        It does nothing if no accumulation window has ended since the last call. Otherwise it is a collective, so all
        ranks must call it after the same number of windows.
        """
        if not self._unread_windows:
            return
        num_windows = len(self._unread_windows)
        pieces = [piece for window in self._unread_windows for piece in window]
        window_numbers = torch.tensor([number for number, window in enumerate(self._unread_windows) for _ in window])
        # The only wait for the device; everything after it happens on the host.
        losses = torch.stack([piece.loss.float() for piece in pieces]).cpu()
        weights = torch.tensor([float(piece.weight) for piece in pieces])
        # A mean over no items is NaN, which must not enter the sum.
        weighted_losses = torch.where(weights > 0, losses * weights, 0.0)
        loss_sums = losses.new_zeros(num_windows).index_add_(0, window_numbers, weighted_losses).tolist()
        weight_sums = losses.new_zeros(num_windows).index_add_(0, window_numbers, weights).tolist()
        self._unread_windows.clear()
        if self._accelerator.num_processes > 1:
            sums = self._accelerator.collectives.reduce_numbers([*loss_sums, *weight_sums])
            loss_sums, weight_sums = sums[:num_windows], sums[num_windows:]
        means = [loss_sum / weight_sum for loss_sum, weight_sum in zip(loss_sums, weight_sums) if weight_sum]
        self._recent += means
        self._total += sum(means)
        self._num_windows += len(means)

    def pop_mean(self) -> float | None:
        """Return the mean loss over the accumulation windows since the last call, or None if there were none.

        Every rank must call it.
        """
        self._read_losses()
        mean = sum(self._recent) / len(self._recent) if self._recent else None
        self._recent = []
        return mean

    def compute_mean(self) -> float:
        """Return the mean loss over all accumulation windows of the run; NaN if there were none.

        Every rank must call it.
        """
        self._read_losses()
        return self._total / self._num_windows if self._num_windows else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and number of all windows' mean losses, and what the next log entry needs.

        With a mixture, the state of `source_book` is included. Every rank must call it.
        """
        self._read_losses()
        state = {
            "recent": list(self._recent),
            "total": self._total,
            "num_windows": self._num_windows,
            # A callback can save a checkpoint at an update whose log entry is still pending.
            "update_values": {name: float(value) for name, value in self.update_values.items()},
            "last_logged": self.last_logged,
        }
        return state if self.source_book is None else {**state, "by_source": self.source_book.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sum and number of all mean losses, and what the next log entry needs."""
        self._recent = list(state["recent"])
        self._total = state["total"]
        self._num_windows = state["num_windows"]
        self.update_values = dict(state.get("update_values", {}))  # earlier checkpoints do not have it
        self.last_logged = state.get("last_logged", 0)
        if self.source_book is not None and "by_source" in state:
            self.source_book.load_state_dict(state["by_source"])
