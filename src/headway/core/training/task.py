"""Batch and loss function of a `forward_backward` call, which can split the batch to fit it into memory.

A part of a split batch, a group of its rows, is called a piece. Each piece is run as a micro-batch.
"""

from collections.abc import Callable

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.core.runtime.readback import Readback
from headway.errors import ConfigError, LossError

Weigher = Callable[[Tree], float | torch.Tensor]
"""Function that returns the number of items, such as rows or tokens, that a loss was taken over.

Its argument is the batch, or the piece of it that the loss belongs to.
"""

RowSplitter = Callable[[Tree, int, int], Tree]
"""Function from (batch, start, stop) to the piece that consists of the batch's rows `start` to `stop` - 1."""


class BatchTask:
    """One call of `forward_backward`: its batch, its loss function, and the loss accumulated so far.

    A batch that does not fit into memory runs in pieces, which are groups of its rows.

    Args:
        batch: Batch as the caller passed it.
        fn: Function from the batch, or a piece of it, to its loss.
        weight: Function from the batch, or a piece of it, to the number of items that the loss was taken over. None:
            the number of rows.
        reduction: Whether `fn` returns the "mean" or the "sum" of the loss over these items.
        split: Function that slices the batch. None: slice all tensors that have as many rows as the batch.

    Raises:
        LossError: If `fn` or `weight` is not callable.
        ConfigError: If `split` is not callable.
    """

    def __init__(
        self,
        batch: Tree,
        fn: Callable[[Tree], torch.Tensor],
        weight: Weigher | None,
        reduction: str,
        split: RowSplitter | None = None,
    ) -> None:
        if not callable(fn):
            raise LossError(
                f"forward_backward got fn={type(fn).__name__}, which cannot be called; give the batch first, then a function from a "
                "micro-batch to its loss: forward_backward(batch, lambda piece: ...)"
            )
        if weight is not None and not callable(weight):
            raise LossError(
                f"forward_backward got weight={weight!r}; give a function from a micro-batch to the number of items that its "
                "loss was taken over, weight=lambda piece: ... (a number is for accelerator.backward)"
            )
        check_splitter(split, "forward_backward")
        self.batch = batch
        self.split = split
        self.fn = fn
        self.weight = weight
        self.reduction = reduction
        self.start_over()

    def start_over(self) -> None:
        """Reset the accumulated loss and weight to zero, because the batch is run again."""
        self._total = torch.zeros(())
        self._weight = 0.0

    def make_weigher(self, piece: Tree) -> Callable[[], float | None]:
        """Return a function without arguments that returns the loss weight of a piece of the batch.

        If no weight function was given, it returns None, and the loss is then weighted by the number of rows.

        Call this method before the forward, and the returned function after it. Items on an accelerator are counted
        before the forward. The host then reads a number that was copied while the forward was being queued. If the
        forward changes or replaces the piece's tensors, items are counted again afterwards.

        Args:
            piece: Piece of the batch, or the whole batch.
        """
        weight = self.weight
        if weight is None:
            return _return_none
        versions_before = _list_versions(piece)
        if not versions_before:  # on the CPU, or in containers that are not searched: count after the forward
            return lambda: float(weight(piece))
        early_count = weight(piece)
        readback = Readback(early_count) if isinstance(early_count, torch.Tensor) else None

        def read_weight() -> float:
            versions = _list_versions(piece)
            is_unchanged = len(versions) == len(versions_before) and all(
                tensor is tensor_before and version == version_before
                for (tensor, version), (tensor_before, version_before) in zip(versions, versions_before)
            )
            if not is_unchanged:
                return float(weight(piece))
            return float(early_count if readback is None else readback.read())

        return read_weight

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss of a piece of the batch. A loss with weight 0 is ignored, because it can be NaN.

        Args:
            loss: Mean or sum of the loss over the piece's items, as `reduction` requests, without a graph.
            weight: Number of these items.
        """
        if weight:
            loss_sum = loss.reshape(()).float() * (1.0 if self.reduction == "sum" else weight)
            self._total = loss_sum if self._weight == 0 else self._total + loss_sum
        elif self._weight == 0:
            self._total = torch.zeros((), device=loss.device)  # for the collective, on the loss's device
        self._weight += weight

    def loss(self, group: Collectives) -> torch.Tensor:
        """Return the batch's mean loss per item over the ranks of `group`, as a 0-d tensor. NaN if no item counts.

        This is the mean for both reductions. All ranks of `group` must call this method.
        """
        if group.world_size == 1:
            return self._total / self._weight if self._weight else self._total * float("nan")
        # Fill the tensor on the device, because copying a number from pageable memory would make the host wait.
        pair = torch.stack([self._total, torch.full_like(self._total, self._weight)])
        group.sum_in_place([pair])
        return pair[0] / pair[1]


def check_splitter(split: RowSplitter | None, method: str) -> None:
    """Raise an error if the `split` argument of an Accelerator's method cannot be called.

    Args:
        split: The argument. None if it was not given.
        method: Name of the method, for the message.

    Raises:
        ConfigError: If `split` is neither None nor callable.
    """
    if split is not None and not callable(split):
        raise ConfigError(
            f"{method} got split={split!r}; give a function that returns the rows from start to stop - 1 of a batch: "
            "split=lambda batch, start, stop: ..."
        )


def _return_none() -> None:
    """Return None, so that the loss is weighted by the number of rows in the batch."""


def _list_versions(piece: Tree) -> list[tuple[torch.Tensor, int]]:
    """Return pairs of (tensor, version counter) for each tensor in `piece` that is on an accelerator.

    In-place changes increase the version counter. Inference tensors are left out, because they have none.

    Args:
        piece: Nested tensors: a piece of a batch, or a whole batch.
    """
    return [(t, t._version) for t in list_tensors(piece) if t.device.type != "cpu" and not t.is_inference()]
