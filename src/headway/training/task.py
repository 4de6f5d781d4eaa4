"""A batch as a function, for `forward_backward`: what runs on each piece, and the loss of the pieces so far."""

from collections.abc import Callable

import torch

from headway.collectives.door import Collectives
from headway.collectives.tree import Tree
from headway.errors import LossError

Weigher = Callable[[Tree], float | torch.Tensor]
"""Over how many items the loss of a piece was taken."""


class Task:
    """One batch as a function, and the loss of the attempt in progress.

    Args:
        batch: as the caller gave it.
        fn: from a piece to its loss.
        weight: from a piece to the number of items its loss was taken over; None: its rows.
        reduction: "mean" or "sum".

    Raises:
        LossError: the weight is not a function.
    """

    def __init__(self, batch: Tree, fn: Callable[[Tree], torch.Tensor], weight: Weigher | None, reduction: str) -> None:
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
        pair = torch.stack([self._total, self._total.new_tensor(self._weight)])
        group.sum_in_place([pair])
        return pair[0] / pair[1]
