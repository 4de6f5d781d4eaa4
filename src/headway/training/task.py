"""A batch as a function, for `forward_backward`: what runs on each piece, and the loss of the pieces so far."""

from collections.abc import Callable

import torch

from headway.errors import LossError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, tensors
from headway.runtime.transfers import Readback

Weigher = Callable[[Tree], float | torch.Tensor]
"""Over how many items the loss of a piece was taken."""


class BatchTask:
    """One batch as a function, and the loss of the attempt in progress.

    Args:
        batch: as the caller gave it.
        fn: from a piece to its loss.
        weight: from a piece to the number of items its loss was taken over; None: its rows.
        reduction: "mean" or "sum".

    Raises:
        LossError: fn or the weight is not a function.
    """

    def __init__(self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str) -> None:
        if not callable(fn):
            raise LossError(
                f"forward_backward got fn={type(fn).__name__}, which cannot be called; give the batch first, then a function from a "
                "piece to its loss: forward_backward(batch, lambda piece: ...)"
            )
        if weight is not None and not callable(weight):
            raise LossError(
                f"forward_backward got weight={weight!r}; give a function from a piece to the number of items that its loss was "
                "taken over, weight=lambda piece: ... (a number is for accelerator.backward)"
            )
        self.batch = batch
        self.fn = fn
        self.weight = weight
        self.reduction = reduction
        self.start_over()

    def start_over(self) -> None:
        """Nothing has been computed yet."""
        self._total = torch.zeros(())
        self._weight = 0.0

    def weigher(self, piece: Tree) -> Callable[[], float | None]:
        """What gives the piece's weight once its loss is computed.

        Its items are counted beforehand, so that on an accelerator the host reads a number that came while the forward was
        queued. What changes the piece's tensors in its forward is counted afterwards instead.
        """
        weight = self.weight
        if weight is None:
            return _nothing
        before = _versions(piece)
        if not before:  # on the host, or in containers that nobody looks into: counted where it always was
            return lambda: float(weight(piece))
        counted = weight(piece)
        early = Readback(counted) if isinstance(counted, torch.Tensor) else None

        def read() -> float:
            now = _versions(piece)
            if len(now) != len(before) or any(a is not b or v != w for (a, v), (b, w) in zip(now, before)):
                return float(weight(piece))
            return float(counted if early is None else early.read())

        return read

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """A piece went through; what weighs nothing may be NaN."""
        if weight:
            share = loss.reshape(()).float() * (1.0 if self.reduction == "sum" else weight)
            self._total = share if self._weight == 0 else self._total + share
        elif self._weight == 0:
            self._total = torch.zeros((), device=loss.device)
        self._weight += weight

    def loss(self, group: Collectives) -> torch.Tensor:
        """The batch's loss over the ranks of `group`: a 0-d tensor."""
        if group.world_size == 1:
            return self._total / self._weight if self._weight else self._total * float("nan")
        # Filled where it lies: a number's copy from pageable memory would be waited for.
        pair = torch.stack([self._total, torch.full_like(self._total, self._weight)])
        group.sum_in_place([pair])
        return pair[0] / pair[1]


def _nothing() -> None:
    """The rows weigh."""


def _versions(piece: Tree) -> list[tuple[torch.Tensor, int]]:
    """Which tensors on an accelerator the piece holds, and how often each was changed."""
    return [(t, t._version) for t in tensors(piece) if t.device.type != "cpu" and not t.is_inference()]
