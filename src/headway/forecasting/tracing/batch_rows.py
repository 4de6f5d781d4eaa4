"""Batches of any size, from one that is there: its rows are repeated or cut, without values."""

from collections.abc import Mapping

import torch

from headway.errors import DataError
from headway.forecasting.tracing.masks import MASK
from headway.runtime.collectives.tree import Tree, find_batch_size, map_tensors, tensors


class BatchResizer:
    """Gives the batch with another number of rows.

    Args:
        batch: a real one: tensors, and whatever holds them. Tensors with as many rows as the first one grow and shrink.

    Attributes:
        num_rows: of the batch.
        is_padded: its attention_mask masks something; None: there is none.
        caveats: what is assumed.

    Raises:
        DataError: there is no tensor with rows in it.
    """

    def __init__(self, batch: Tree) -> None:
        num_rows = find_batch_size(batch)
        if not num_rows:
            raise DataError(
                "the batch has no tensor with a first dimension, so its number of samples is unknown; give one real micro-batch"
            )
        self.num_rows = num_rows
        self._batch = dict(batch) if isinstance(batch, Mapping) else batch
        self.is_padded = _is_padded(self._batch)
        others = [list(each.shape) for each in tensors(self._batch) if each.ndim and each.shape[0] != num_rows]
        found: list[str] = []
        if others:
            found.append(
                f"the batch has {num_rows} samples, but also tensors of shape {others[0]}, which are assumed to be the same for "
                "any batch; give batch_fn= if they are not"
            )
        self.caveats = tuple(found)

    def __call__(self, size: int) -> Tree:
        """With so many rows, on torch's meta device."""
        return map_tensors(lambda tensor: self._sized(tensor, size), self._batch)

    def _sized(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.ndim == 0 or tensor.shape[0] != self.num_rows or size == self.num_rows:
            return shape
        return torch.cat([shape] * -(-size // self.num_rows))[:size]


def _is_padded(batch: Tree) -> bool | None:
    mask = batch.get(MASK) if isinstance(batch, dict) else None
    return not bool(mask.all()) if isinstance(mask, torch.Tensor) and not mask.is_meta else None
