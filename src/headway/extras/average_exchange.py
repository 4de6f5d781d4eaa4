"""Exchange of a model's weights with their averages, in place and bucket by bucket, so that it needs little memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from headway.core.training.gathered_tensors import iterate_buckets
from headway.extras._torch import foreach_copy_

_BUCKET_BYTES = 64 * 2**20
"""Bytes of tensors that are exchanged or converted at once. This needs temporary memory of the same size."""
_SCRATCH_BYTES = 256 * 2**10
"""Size of the scratch buffer through which tensors in host memory are exchanged."""


class WeightPair(NamedTuple):
    """This rank's shard of a weight, and the averages of its elements.

    Attributes:
        weight: Shard of the weight, as a plain tensor.
        average: Averages of its elements.
    """

    weight: torch.Tensor
    average: torch.Tensor

    @property
    def has_same_dtype_and_device(self) -> bool:
        """Whether weight and average have the same dtype and device, so that their values can be exchanged."""
        return self.weight.dtype == self.average.dtype and self.weight.device == self.average.device


def split_pairs(pairs: Sequence[WeightPair]) -> Iterator[list[WeightPair]]:
    """Yield the pairs in buckets, each with at most `_BUCKET_BYTES` of weights or averages. A larger pair is alone."""
    return iterate_buckets(((pair, max(each.nbytes for each in pair)) for pair in pairs), _BUCKET_BYTES)


class WeightExchange:
    """Exchange of weights and averages, which happens at construction and can be undone.

    If the dtypes or devices of weights and averages differ, the averages are only copied into the weights. Copies of
    the weights are then kept on the averages' device.

    Args:
        groups: Lists of pairs. All pairs of a list have the same dtypes and devices.
    """

    def __init__(self, groups: Iterable[Sequence[WeightPair]]) -> None:
        self._buckets = [bucket for pairs in groups for bucket in split_pairs(pairs)]
        # One entry per bucket that has been exchanged so far: copies of its weights, or None if they are in the averages.
        self._weight_copies: list[list[torch.Tensor] | None] = []
        try:
            for bucket in self._buckets:
                self._weight_copies.append(_exchange_bucket(bucket))
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def undo(self) -> None:
        """Put the trained weights back into the model, and the averages into their own tensors."""
        for bucket, copies in zip(self._buckets, self._weight_copies):
            if copies is None:  # a second exchange restores both
                _exchange_bucket(bucket)
            else:
                foreach_copy_([pair.weight for pair in bucket], copies)


@torch.no_grad()
def _exchange_bucket(bucket: Sequence[WeightPair]) -> list[torch.Tensor] | None:
    """Exchange weights and averages. If their dtypes or devices differ, only copy the averages into the weights.

    Args:
        bucket: Pairs of weights and averages with equal dtypes and devices.

    Returns:
        Copies of the weights if dtype or device differ, else None.
    """
    weights, averages = [pair.weight for pair in bucket], [pair.average for pair in bucket]
    if bucket[0].has_same_dtype_and_device:
        if weights[0].device.type == "cpu" and all(each.is_contiguous() for pair in bucket for each in pair):
            _exchange_in_cache(weights, averages)
        else:
            copies = [weight.clone() for weight in weights]
            foreach_copy_(weights, averages)
            foreach_copy_(averages, copies)
        return None
    weight_copies = [weight.to(averages[0].device, copy=True) for weight in weights]
    foreach_copy_(weights, averages)
    return weight_copies


def _exchange_in_cache(weights: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
    """Exchange the values of two lists of contiguous tensors in host memory, pair by pair.

    The values pass through a scratch buffer that fits into the CPU's cache. Copies of whole tensors would be written to
    main memory and read again, which takes about twice as long.
    """
    size = _SCRATCH_BYTES // weights[0].element_size()
    scratch = torch.empty(size, dtype=weights[0].dtype)
    for weight, average in zip(weights, averages):
        flat_weight, flat_average = weight.view(-1), average.view(-1)
        for start in range(0, len(flat_weight), size):
            weight_slice, average_slice = flat_weight[start : start + size], flat_average[start : start + size]
            saved = scratch[: len(weight_slice)]
            saved.copy_(weight_slice)
            weight_slice.copy_(average_slice)
            average_slice.copy_(saved)
