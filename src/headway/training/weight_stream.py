"""A model's weights on their way out, to an engine that generates: whole tensors in bounded buckets, all ranks in step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headway.common.text import parse_bytes
from headway.errors import CollectiveError
from headway.runtime.collectives.checked import Collectives
from headway.training.merged_adapters import merged
from headway.training.whole_weights import GatheredTensor, gathered
from headway.weights.export import untied
from headway.weights.shards import TensorSpec, dtype_name

Bucket = list[tuple[str, torch.Tensor]]
"""Names, and whole tensors on rank 0; on the other ranks without memory (meta)."""


class WeightStream:
    """Buckets of whole tensors, made as they are asked for; every rank iterates, once.

    A rank that leaves the loop early, by an error or a break, tells the others, for which that is an error, too.

    Args:
        tensors: of the model, by name; of tied ones the first comes.
        bucket_size: the most bytes in a bucket, or text such as "64MiB"; a larger tensor has a bucket of its own.
        everyone: all ranks.
        adapted: the model whose adapters are merged; None: they come apart.

    Attributes:
        metadata: (name, name of the dtype, shape) of each tensor, in the order in which they come.

    Raises:
        CheckpointError: ranks hold other tensors.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Any]],
        bucket_size: int | str,
        everyone: Collectives,
        adapted: torch.nn.Module | None = None,
    ) -> None:
        kept, tied = untied(tensors)
        self._whole: Mapping[str, Any] = gathered(kept, everyone)
        if adapted is not None:
            self._whole = merged(adapted, self._whole, tied)
        self._most = parse_bytes(bucket_size)
        self._everyone = everyone
        self.metadata = [(name, dtype_name(each.dtype), list(each.shape)) for name, each in self._whole.items()]

    def __iter__(self) -> Iterator[Bucket]:
        others_left, is_within = False, False
        try:
            for names in [*self._plan(), []]:
                is_within, others_left = False, self._meet()
                if others_left or not names:
                    break
                is_within, bucket = True, self._bring(names)
                yield bucket
                bucket.clear()  # else the receiver's variable keeps it while the next one comes
        finally:
            if is_within:
                self._meet(leaves=True)
        if others_left:
            raise CollectiveError(
                "another rank left accelerator.stream_weights() before its end, by a break or by an error that it shows, such as one "
                "of its receiver; all ranks have stopped, and the receiver has a part of the weights"
            )

    def _meet(self, leaves: bool = False) -> bool:
        """Does any other rank leave?"""
        rows = self._everyone.gather_numbers([float(leaves)], "stream_weights")
        return any(row[0] for rank, row in enumerate(rows) if rank != self._everyone.rank)

    def _bring(self, names: list[str]) -> Bucket:
        found = [(name, self._whole[name]) for name in names]
        try:
            if self._everyone.rank == 0:
                return [(name, each.whole() if isinstance(each, GatheredTensor) else each) for name, each in found]
        finally:  # on other ranks, and where rank 0 had no memory for one: the others send it
            for _, each in found:
                if isinstance(each, GatheredTensor) and not each.is_done:
                    each.pass_by()
        return [(name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for name, each in found]

    def _plan(self) -> list[list[str]]:
        plan: list[list[str]] = []
        room = 0
        for name, each in self._whole.items():
            size = TensorSpec(tuple(each.shape), each.dtype).num_bytes
            if not plan or size > room:
                plan.append([])
                room = self._most
            plan[-1].append(name)
            room -= size
        return plan
