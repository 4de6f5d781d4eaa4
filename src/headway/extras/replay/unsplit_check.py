"""Warning about tensors of a batch that have another number of rows than the batch, and would not be split with it."""

import torch

from headway.core.runtime.collectives.tree import Tree, name_leaves
from headway.log import get_logger

log = get_logger(__name__)

_MAX_CHECKS = 4
"""Number of batches that are checked. A tensor of one entry per image can equal the batch size by chance."""
_MAX_NAMES = 3


class UnsplitCheck:
    """Check whether the first few batches contain tensors that would not be split. It warns once.

    Such a tensor can be meant for the whole batch, such as class weights. But often its entries belong to rows, such as
    the images of a vision-language model or the nodes of a graph. Every piece would then contain the entries of all
    rows.
    """

    def __init__(self) -> None:
        self._num_checks = 0

    def check(self, batch: Tree, num_rows: int | None) -> None:
        """Warn, at most once, if a batch of several rows contains a tensor with another number of rows.

        Only the first `_MAX_CHECKS` such batches are checked. Scalars are ignored.

        Args:
            batch: Batch of this rank.
            num_rows: Number of rows of the batch, or None if it has no rows.
        """
        if num_rows is None or num_rows < 2 or self._num_checks >= _MAX_CHECKS:
            return
        self._num_checks += 1
        unsplit = [
            f"{path or 'the batch'} of shape {tuple(leaf.shape)}"
            for path, leaf in name_leaves(batch)
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] != num_rows
        ]
        if unsplit:
            self._num_checks = _MAX_CHECKS
            names = ", ".join(unsplit[:_MAX_NAMES])
            more = f" and {len(unsplit) - _MAX_NAMES} more" if len(unsplit) > _MAX_NAMES else ""
            log.warning_once(
                f"the batch has {num_rows} rows, but contains {names}{more}. If memory runs out, each micro-batch of it "
                "contains such a tensor unchanged. If its entries belong to rows, give a function that slices the batch: "
                "accelerator.microbatches(batch, split=lambda batch, start, stop: ...), also for forward_backward "
                "(docs/microbatching.md)"
            )
