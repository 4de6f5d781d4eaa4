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
    def is_alike(self) -> bool:
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
        self._copies: list[list[torch.Tensor] | None] = []  # of the first buckets; None for values that are exchanged
        try:
            for bucket in self._buckets:
                self._copies.append(_swap_in(bucket))
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def undo(self) -> None:
        """Put the trained weights back."""
        for bucket, copies in zip(self._buckets, self._copies):
            if copies is None:
                _swap_in(bucket)
            else:
                foreach_copy_([pair.weight for pair in bucket], copies)


@torch.no_grad()
def _swap_in(bucket: Sequence[WeightPair]) -> list[torch.Tensor] | None:
    """Exchange weights and averages. If their dtypes or devices differ, only copy the averages into the weights.

    Args:
        bucket: Pairs of weights and averages with equal dtypes and devices.

    Returns:
        Copies of the weights if dtype or device differ, else None.
    """
    weights, averages = [pair.weight for pair in bucket], [pair.average for pair in bucket]
    if bucket[0].is_alike:
        if weights[0].device.type == "cpu" and all(each.is_contiguous() for pair in bucket for each in pair):
            _exchange_in_cache(weights, averages)
        else:
            copies = [weight.clone() for weight in weights]
            foreach_copy_(weights, averages)
            foreach_copy_(averages, copies)
        return None
    stash = [weight.to(averages[0].device, copy=True) for weight in weights]
    foreach_copy_(weights, averages)
    return stash


def _exchange_in_cache(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Exchange the values of two lists of contiguous tensors in host memory, pair by pair.

    The values pass through a scratch buffer that fits into the CPU's cache. Copies of whole tensors would be written to
    main memory and read again, which takes about twice as long.
    """
    size = _SCRATCH_BYTES // ones[0].element_size()
    scratch = torch.empty(size, dtype=ones[0].dtype)
    for one, other in zip(ones, others):
        flat, flat_other = one.view(-1), other.view(-1)
        for start in range(0, len(flat), size):
            here, there = flat[start : start + size], flat_other[start : start + size]
            part = scratch[: len(here)]
            part.copy_(here)
            here.copy_(there)
            there.copy_(part)
