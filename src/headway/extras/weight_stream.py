"""Stream of a model's weights to an inference engine: full (gathered) tensors in buckets of limited size.

All ranks iterate together.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headway.common.text import parse_bytes
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.gathered_tensors import (
    GatheredTensor,
    discard_remaining,
    iterate_buckets,
    wrap_sharded_tensors,
)
from headway.core.training.interfaces import WeightBuckets
from headway.core.weights.export import split_ties
from headway.core.weights.tensor_bytes import TensorSpec, get_dtype_name
from headway.errors import CollectiveError
from headway.extras.merged_adapters import merge_adapters

Bucket = list[tuple[str, torch.Tensor]]
"""Pairs of (name, tensor): full tensors on rank 0, meta tensors without memory on the other ranks."""


class WeightStream(WeightBuckets):
    """Iterable over a model's full tensors in buckets, which are gathered on demand.

    A bucket is a list of (name, tensor) pairs. Rank 0 gets the full tensors, and the other ranks get meta tensors. Every rank
    must iterate exactly once. A bucket is emptied when the next one is requested, so copy what you need later.

    If a rank leaves the loop early, because of an error or a `break`, the loop raises CollectiveError on the other
    ranks.

    Args:
        tensors: Pairs of (name, tensor) of the model. Only the first of several tied tensors is sent.
        bucket_size: Maximum size of a bucket, in bytes or as text such as "64MiB". A larger tensor gets its own bucket.
        everyone: Collectives over all ranks.
        adapted: Model whose adapters are merged. None: adapters are sent separately.

    Attributes:
        metadata: Triples of (name, dtype name, shape), one per tensor, in the order in which they are sent.

    Raises:
        CheckpointError: If ranks have different tensors.
        ConfigError: If `bucket_size` is not a size.
        UnsupportedError: If `adapted` has no adapters, or they cannot be merged.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Any]],
        bucket_size: int | str,
        everyone: Collectives,
        adapted: torch.nn.Module | None = None,
    ) -> None:
        first_of_ties, tied_names = split_ties(tensors)
        # Sharded tensors, and those that are built on demand, are `GatheredTensor` objects.
        self._tensors: Mapping[str, Any] = wrap_sharded_tensors(first_of_ties, everyone)
        if adapted is not None:
            self._tensors = merge_adapters(adapted, self._tensors, tied_names)
        self._max_bytes = parse_bytes(bucket_size)
        self._everyone = everyone
        self.metadata = [(name, get_dtype_name(each.dtype), list(each.shape)) for name, each in self._tensors.items()]

    def __iter__(self) -> Iterator[Bucket]:
        has_other_left = False
        must_report = False  # whether the other ranks wait for this rank's report if it leaves now
        specs = {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in self._tensors.items()}
        sizes = ((name, spec.num_bytes) for name, spec in specs.items())
        try:
            for names in [*iterate_buckets(sizes, self._max_bytes), []]:  # all ranks also report after the last bucket
                must_report = False
                has_other_left = self._report_leaving()
                if has_other_left or not names:
                    break
                must_report = True  # from here on: the gather and the caller's loop body can both raise
                bucket = self._gather_bucket(names)
                yield bucket
                bucket.clear()  # otherwise the receiver's variable keeps this bucket alive while the next one is gathered
        finally:
            if must_report:
                self._report_leaving(is_leaving=True)
        if has_other_left:
            raise CollectiveError(
                "another rank left accelerator.stream_weights() early, by a break or by an error, which its output shows. All "
                "ranks have stopped, and the receiver has only a part of the weights"
            )

    def _report_leaving(self, is_leaving: bool = False) -> bool:
        """Report to all ranks whether this rank leaves the loop early. Return whether any other rank does.

        This is a collective.

        Args:
            is_leaving: Whether this rank leaves the loop early. Default: False.
        """
        rows = self._everyone.gather_numbers([float(is_leaving)], "stream_weights")
        return any(row[0] for rank, row in enumerate(rows) if rank != self._everyone.rank)

    def _gather_bucket(self, names: list[str]) -> Bucket:
        """Return the named tensors: full tensors on rank 0, and meta tensors of the same shapes on the other ranks."""
        tensors = [(name, self._tensors[name]) for name in names]
        try:
            if self._everyone.rank == 0:
                return [(name, each.assemble() if isinstance(each, GatheredTensor) else each) for name, each in tensors]
        finally:  # on other ranks, and on rank 0 if it ran out of memory: the others still send
            discard_remaining(each for _, each in tensors)
        return [(name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for name, each in tensors]


# ---------------------------------------------------------------- adapters
