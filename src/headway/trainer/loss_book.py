"""`LossBook`: recorder of a training run's losses and of the other values of its log entries."""

from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.trainer.loss import _MOST_WAITING
from headway.trainer.source_losses import SourceBook


class LossBook:
    """Recorder of a training run's losses, which computes the logged means.

    For each accumulation window, it computes the exact mean over all micro-batches and ranks. It waits for the device
    only when a value is requested, or when the losses of 512 accumulation windows have not been read yet.

    Args:
        accelerator: Accelerator whose ranks compute the losses.

    Attributes:
        by_source: Recorder of the loss of each dataset in a mixture. None: the training data is not a mixture.
        update_values: Values of the newest update that are logged with the loss, by name, such as the learning rate.
        last_logged: Number of updates at the last log entry with a training loss; 0 before the first entry.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pieces: list[tuple[torch.Tensor, float, int]] = []
        self._window: list[tuple[torch.Tensor, float]] = []
        self._windows: list[list[tuple[torch.Tensor, float]]] = []
        self._recent: list[float] = []
        self._total = 0.0
        self._num_windows = 0
        self.by_source: SourceBook | None = None
        self.update_values: dict[str, torch.Tensor | float] = {}
        self.last_logged = 0

    def add_loss(self, loss: torch.Tensor, weight: float, num_rows: int) -> None:
        """Record the loss of a batch, or of a part of it if the batch was split because memory ran out.

        Args:
            loss: Mean loss of the batch or part.
            weight: Number of samples, or of labels that are not ignored, over which the mean is computed.
            num_rows: Number of rows in the batch or part.
        """
        self._pieces.append((loss.detach(), weight, num_rows))
        if self.by_source is not None:
            self.by_source.end_piece(num_rows)

    def end_batch(self, num_rows: int) -> None:
        """Record that a batch is complete.

        If memory ran out, some rows were run again, so they were recorded twice. Only the last recorded parts are kept,
        as many as are needed for `num_rows` rows.

        Args:
            num_rows: Number of rows in the batch.
        """
        kept, rows = [], 0
        for piece in reversed(self._pieces):
            kept.append(piece[:2])
            rows += piece[2]
            if rows >= num_rows:
                break
        self._window += reversed(kept)
        self._pieces.clear()
        if self.by_source is not None:
            self.by_source.end_batch(num_rows)

    def end_window(self) -> None:
        """Record that the accumulation window is complete. Every rank must call it.

        If the losses of 512 windows have not been read yet, read them from the device, which is a collective.
        """
        if self._window:
            self._windows.append(self._window)
            self._window = []
        if len(self._windows) >= _MOST_WAITING:
            self._read_losses()

    def _read_losses(self) -> None:
        """Read the recorded losses from the device and reduce them over all ranks.

        It does nothing if no accumulation window has ended since the last call. Otherwise it is a collective, so all
        ranks must call it after the same number of windows.
        """
        if not self._windows:
            return
        pieces = [(loss, weight, number) for number, window in enumerate(self._windows) for loss, weight in window]
        # The only wait for the device; everything after it happens on the host.
        losses = torch.stack([loss.float() for loss, _, _ in pieces]).cpu()
        weights = torch.tensor([float(weight) for _, weight, _ in pieces])
        places = torch.tensor([number for _, _, number in pieces])
        # A mean over no items is NaN, which must not enter the sum.
        shares = torch.stack([torch.where(weights > 0, losses * weights, 0.0), weights])
        both = shares.new_zeros(2, len(self._windows)).index_add_(1, places, shares)
        self._windows.clear()
        sums = both.flatten().tolist()
        if self._accelerator.num_processes > 1:
            sums = self._accelerator.collectives.reduce_numbers(sums)
        means = [total / weight for total, weight in zip(sums[: len(sums) // 2], sums[len(sums) // 2 :]) if weight]
        self._recent += means
        self._total += sum(means)
        self._num_windows += len(means)

    def pop_mean(self) -> float | None:
        """Return the mean loss over the accumulation windows since the last call, or None if there were none.

        Every rank must call it.
        """
        self._read_losses()
        found = sum(self._recent) / len(self._recent) if self._recent else None
        self._recent = []
        return found

    def compute_mean(self) -> float:
        """Return the mean loss over all accumulation windows of the run; NaN if there were none.

        Every rank must call it.
        """
        self._read_losses()
        return self._total / self._num_windows if self._num_windows else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and number of all windows' mean losses, and what the next log entry needs.

        With a mixture, the state of `by_source` is included. Every rank must call it.
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
        return state if self.by_source is None else {**state, "by_source": self.by_source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sum and number of all mean losses, and what the next log entry needs."""
        self._recent = list(state["recent"])
        self._total = state["total"]
        self._num_windows = state["num_windows"]
        self.update_values = dict(state.get("update_values", {}))  # earlier checkpoints do not have it
        self.last_logged = state.get("last_logged", 0)
        if self.by_source is not None and "by_source" in state:
            self.by_source.load_state_dict(state["by_source"])
