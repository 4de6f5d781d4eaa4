"""The losses of a training, as they are logged: the exact mean of each window, over its pieces and all ranks."""

from typing import Any

import torch

from headway.accelerator import Accelerator

_MOST_WAITING = 512
"""Windows whose losses wait on the device; then they are read, which waits for it."""


class LossBook:
    """Keeps the losses of windows; nothing waits for the device before a value is asked for.

    Args:
        accelerator: whose ranks compute the windows.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pieces: list[tuple[torch.Tensor, float, int]] = []
        self._window: list[tuple[torch.Tensor, float]] = []
        self._windows: list[list[tuple[torch.Tensor, float]]] = []
        self._recent: list[float] = []
        self._total = 0.0
        self._num_windows = 0

    def add(self, loss: torch.Tensor, weight: float, num_rows: int) -> None:
        """A piece of a batch went through.

        Args:
            loss: its mean.
            weight: over how many items.
            num_rows: the piece's rows.
        """
        self._pieces.append((loss.detach(), weight, num_rows))

    def end_batch(self, num_rows: int) -> None:
        """The batch stands. Where it was run again, the last pieces that have its rows are those that count."""
        kept, rows = [], 0
        for piece in reversed(self._pieces):
            kept.append(piece[:2])
            rows += piece[2]
            if rows >= num_rows:
                break
        self._window += reversed(kept)
        self._pieces.clear()

    def end_window(self) -> None:
        """The window of these batches is over."""
        if self._window:
            self._windows.append(self._window)
            self._window = []
        if len(self._windows) >= _MOST_WAITING:
            self._read()

    def _read(self) -> None:
        """Exchange and read what waits; every rank calls it at the same window."""
        if not self._windows:
            return
        pieces = [(loss, weight, number) for number, window in enumerate(self._windows) for loss, weight in window]
        losses = torch.stack([loss.float() for loss, _, _ in pieces])
        weights = torch.tensor([float(weight) for _, weight, _ in pieces], device=losses.device)
        places = torch.tensor([number for _, _, number in pieces], device=losses.device)
        # A mean over nothing is not a number; it must not get into the sum.
        shares = torch.stack([torch.where(weights > 0, losses * weights, 0.0), weights])
        both = shares.new_zeros(2, len(self._windows)).index_add_(1, places, shares)
        self._windows.clear()
        if self._accelerator.num_processes > 1:
            both = self._accelerator.reduce(both)
        means = [total / weight for total, weight in zip(*both.tolist()) if weight]
        self._recent += means
        self._total += sum(means)
        self._num_windows += len(means)

    def take(self) -> float | None:
        """The mean over the windows since the last call; None where there were none. Every rank calls it."""
        self._read()
        found = sum(self._recent) / len(self._recent) if self._recent else None
        self._recent = []
        return found

    def mean(self) -> float:
        """The mean over all windows of the run; every rank calls it."""
        self._read()
        return self._total / self._num_windows if self._num_windows else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """What was read so far and is not logged yet, and the total; every rank calls it."""
        self._read()
        return {"recent": list(self._recent), "total": self._total, "num_windows": self._num_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._recent, self._total, self._num_windows = list(state["recent"]), state["total"], state["num_windows"]
