"""Random numbers in worker processes: each sample's are seeded by its position in the epoch's order.

Nothing wraps the dataset or the user's worker_init_fn: the indices themselves, once they have travelled to a worker,
seed its torch, Python and NumPy streams as the dataset goes through them. So an augmentation depends on (seed, epoch,
position) alone, not on how many workers or ranks there are, or where a run was resumed. It costs about 10 us a sample.

A dataset that fetches a whole batch at once (`__getitems__`) is seeded once a batch, by the position of its first
sample; so is one that is known to draw nothing.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from headway.runtime.seed import mix


def seed_streams(seed: int) -> None:
    """Seed this worker's torch, Python and NumPy streams."""
    # Not torch.manual_seed, which would seed every device's generator too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class SeededIndices(list[Any]):
    """A batch of indices on its way to a worker; there, going through them seeds the streams for each.

    Args:
        indices: of the batch.
        stream: the seed of the epoch.
        position: where the first of them stands in the epoch's order.
    """

    def __init__(self, indices: Sequence[Any], stream: int, position: int) -> None:
        super().__init__(indices)
        self.stream = stream
        self.position = position

    def __reduce__(self) -> tuple[Any, ...]:
        # A slice is a plain list: iterating here would seed the parent's streams.
        return _arrive, (self[:], self.stream, self.position)

    def __iter__(self) -> Iterator[Any]:
        for offset in range(len(self)):
            seed_streams(mix(self.stream, self.position + offset))
            yield self[offset]


class Seeded:
    """A single index, or a batch of them, on its way to a worker; it seeds the streams once and arrives as it was.

    Args:
        index: whatever the dataset is asked for.
        stream: the seed of the epoch.
        position: where its first sample stands in the epoch's order.
    """

    def __init__(self, index: Any, stream: int, position: int) -> None:
        self.index = index
        self.seed = mix(stream, position)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive_alone, (self.index, self.seed)


def is_read_one_by_one(dataset: Any) -> bool:
    """Does torch ask this dataset for each sample of a batch, and might it draw random numbers for each?"""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) in (TensorDataset, list, tuple, range):
        return False
    return not callable(getattr(dataset, "__getitems__", None))


def _arrive(indices: list[Any], stream: int, position: int) -> SeededIndices:
    seed_streams(mix(stream, position))
    return SeededIndices(indices, stream, position)


def _arrive_alone(index: Any, seed: int) -> Any:
    seed_streams(seed)
    return index
