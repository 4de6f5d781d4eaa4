"""Make batches of any size from a real batch, without values, by repeating or cutting off rows."""

from collections.abc import Mapping

import torch

from headway.core.runtime.collectives.tree import Tree, find_batch_size, list_tensors, map_tensors
from headway.errors import DataError
from headway.forecasting.tracing.attention_masks import MASK, POSITIONS


class BatchResizer:
    """Callable that returns a copy of a real batch with a given number of rows, on the meta device.

    Rows are repeated or cut off.

    Args:
        batch: Real batch: tensors, possibly in nested containers. Tensors are resized if their first dimension equals
            that of the first tensor.

    Attributes:
        num_rows: Number of rows of the real batch.
        is_padded: Whether the batch's `attention_mask` masks any token, or None if the batch has no mask.
        is_packed: Whether `position_ids` are not consecutive in some row of the batch, as in packed sequences.
        caveats: Assumptions about the batch, as sentences.

    Raises:
        DataError: If the batch has no tensor with a first dimension.
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
        self.is_packed = _is_packed(self._batch)
        other_shapes = [
            list(each.shape) for each in list_tensors(self._batch) if each.ndim and each.shape[0] != num_rows
        ]
        self.caveats: tuple[str, ...] = ()
        if other_shapes:
            self.caveats = (
                f"the batch has {num_rows} samples, but also tensors of shape {other_shapes[0]}, which are assumed to be the same "
                "for any batch; give batch_fn= if they are not",
            )

    def __call__(self, size: int) -> Tree:
        """Return the batch with `size` rows, on the meta device."""
        return map_tensors(lambda tensor: self._resize_tensor(tensor, size), self._batch)

    def _resize_tensor(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Return a meta tensor like the given one, with `size` rows if the first dimension has one entry per row.

        Args:
            tensor: Tensor of the original batch.
            size: Number of rows.
        """
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.ndim == 0 or tensor.shape[0] != self.num_rows or size == self.num_rows:
            return meta
        num_repeats = -(-size // self.num_rows)
        return torch.cat([meta] * num_repeats)[:size]


def _is_padded(batch: Tree) -> bool | None:
    """Whether the batch's attention mask masks any token, or None if the batch has no mask with values."""
    mask = _get_values(batch, MASK)
    return None if mask is None else not bool(mask.all())


def _is_packed(batch: Tree) -> bool:
    """Whether the batch has position IDs that are not consecutive in some row."""
    position_ids = _get_values(batch, POSITIONS)
    return position_ids is not None and bool((position_ids.diff() != 1).any())


def _get_values(batch: Tree, name: str) -> torch.Tensor | None:
    """Return a named tensor of a batch, or None if the batch has no such tensor with values."""
    tensor = batch.get(name) if isinstance(batch, dict) else None
    return tensor if isinstance(tensor, torch.Tensor) and not tensor.is_meta else None
