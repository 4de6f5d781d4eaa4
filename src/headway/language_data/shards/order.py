"""Order of records: a pure function of (seed, epoch, position) in which records of the same block stay close together.

Shuffling permutes the blocks of all shards, and then the records within windows of `buffer_size` consecutive records.
A window corresponds to the content of a shuffle buffer, but no record is copied or saved. The permutation of a window
is computed from the seed, the epoch and the window's index. It is found by sorting hashes, so it does not depend on a
library's random generator.

In a run on several machines, all ranks read from all blocks of a window, so each machine fetches all of them. Stripes
avoid this. Each stripe is a range of the shuffled blocks, and provides a fixed part of every step. A machine then
fetches only the blocks of its ranks' stripes. The order depends on the number of stripes, but not on the number of
machines.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
Hashes = numpy.ndarray[Any, numpy.dtype[numpy.uint64]]

_NUM_KEPT_WINDOWS = 8
"""Smallest number of windows whose permutations are cached."""
_MASK = 2**64 - 1
_INCREMENT = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 generator: 2**64 divided by the golden ratio."""


class RecordLocations(NamedTuple):
    """Locations of records.

    Attributes:
        blocks: Index of each record's block.
        indices: Index of each record in its block.
    """

    blocks: Integers
    indices: Integers


class EpochPlan(NamedTuple):
    """Order of the blocks in one epoch.

    Attributes:
        blocks: Indices of the blocks in the epoch's order.
        begins: First position of each block in that order, followed by the total number of records.
    """

    blocks: Integers
    begins: Integers


@dataclass(frozen=True)
class Stripes:
    """Division of the order into ranges that are read in parallel.

    Attributes:
        count: Number of stripes; 1 to read one position after another.
        samples_per_step: Number of records that all ranks together read per step: a multiple of `count`.
    """

    count: int = 1
    samples_per_step: int = 1

    def interleave(self, positions: Integers, num_records: int) -> Integers:
        """Convert positions in the order in which ranks read to positions in the shuffled order.

        Each stripe is a range of consecutive positions in the shuffled order. Every step reads the next part of each
        stripe. Positions after the last complete step do not change.

        Args:
            positions: Positions in the order in which the ranks read.
            num_records: Number of records in the epoch.
        """
        samples_per_stripe = self.samples_per_step // self.count  # in one step
        num_steps = num_records // self.samples_per_step
        steps, places_in_step = numpy.divmod(positions, self.samples_per_step)
        stripes, places_in_stripe = numpy.divmod(places_in_step, samples_per_stripe)
        interleaved = (stripes * num_steps + steps) * samples_per_stripe + places_in_stripe
        return numpy.where(steps < num_steps, interleaved, positions)


_ONE_STRIPE = Stripes()


class ShardOrder:
    """Order in which the records of all shards are read.

    Args:
        counts: Number of records in each block.
        units: Index of the unit that each block belongs to, in ascending order. The blocks of a unit stay together,
            because a compressed shard has to be decompressed as a whole.
        seed: Seed of the order.
        buffer_size: Number of records that are shuffled together, counted over all stripes. 0 to keep the order of the
            files.
        stripes: Division of the order into ranges that are read in parallel. Default: a single range.
    """

    def __init__(
        self, counts: Integers, units: Integers, seed: int, buffer_size: int, stripes: Stripes = _ONE_STRIPE
    ) -> None:
        self._counts = counts
        self._units = units
        self._seed = seed
        self._buffer_size = max(1, buffer_size // stripes.count) if buffer_size else 0
        self._stripes = stripes
        self._num_kept_windows = max(_NUM_KEPT_WINDOWS, 2 * stripes.count)
        self._num_records = int(counts.sum())
        self._plan: tuple[int, EpochPlan] | None = None  # epoch, and its plan
        self._windows: dict[tuple[int, int], Integers] = {}  # permutations by (epoch, index of the window)

    def __len__(self) -> int:
        return self._num_records

    def locate(self, positions: Integers, epoch: int) -> RecordLocations:
        """Return the locations of records: for each position in an epoch, the block and the index within the block."""
        plan = self._get_plan(epoch)
        if self._stripes.count > 1:
            positions = self._stripes.interleave(positions, self._num_records)
        if self._buffer_size:
            positions = self._shuffle_in_windows(positions, epoch)
        places = numpy.searchsorted(plan.begins, positions, side="right") - 1
        return RecordLocations(plan.blocks[places], positions - plan.begins[places])

    def _get_plan(self, epoch: int) -> EpochPlan:
        """Return the order of the blocks in an epoch. If blocks are not shuffled, all epochs have the plan of epoch 0."""
        planned_epoch = epoch if self._buffer_size else 0
        if self._plan is None or self._plan[0] != planned_epoch:
            self._plan = planned_epoch, self._make_plan(planned_epoch)
        return self._plan[1]

    def _make_plan(self, epoch: int) -> EpochPlan:
        """Compute the order of the blocks in an epoch. Units (blocks that stay together) are shuffled as a whole."""
        blocks = numpy.arange(len(self._counts), dtype=numpy.int64)
        if self._buffer_size:
            num_units = int(self._units[-1]) + 1
            unit_order = permute_numbers(num_units, hash_numbers(self._seed, epoch, 0))
            place_of_unit = numpy.empty(num_units, numpy.int64)  # the inverse permutation
            place_of_unit[unit_order] = numpy.arange(num_units)
            # The sort is stable, so the blocks of a unit keep their order.
            blocks = numpy.argsort(place_of_unit[self._units], kind="stable")
        begins = numpy.concatenate([[0], numpy.cumsum(self._counts[blocks])])
        return EpochPlan(blocks, begins)

    def _shuffle_in_windows(self, positions: Integers, epoch: int) -> Integers:
        """Convert positions in the shuffled order of records to positions in the order of blocks."""
        size = self._buffer_size
        windows = positions // size
        shuffled = numpy.empty_like(positions)
        for window in numpy.unique(windows).tolist():
            is_inside = windows == window
            begin = window * size
            shuffled[is_inside] = begin + self._get_window(epoch, window)[positions[is_inside] - begin]
        return shuffled

    def _get_window(self, epoch: int, window: int) -> Integers:
        """Return the permutation of the records in a window, as indices within the window."""
        permutation = self._windows.get((epoch, window))
        if permutation is None:
            size = min(self._buffer_size, self._num_records - window * self._buffer_size)
            permutation = permute_numbers(size, hash_numbers(self._seed, epoch, 1 + window))
            while len(self._windows) >= self._num_kept_windows:
                oldest = next(iter(self._windows))
                del self._windows[oldest]
            self._windows[epoch, window] = permutation
        return permutation


def permute_numbers(count: int, seed: int) -> Integers:
    """Return a permutation of the numbers from 0 to `count - 1`, which depends only on `count` and the seed."""
    numbers = numpy.arange(count, dtype=numpy.uint64)
    # The increment of SplitMix64, whose states are `seed + number * increment`.
    hashes = _hash_values(numbers * numpy.uint64(_INCREMENT) + numpy.uint64(seed))
    return numpy.argsort(hashes, kind="stable")


def hash_numbers(*values: int) -> int:
    """Hash several integers to a 64-bit number, which depends on all of them and their order."""
    state = numpy.uint64(0)
    for value in values:
        state = _hash_values(numpy.array([(int(state) + value + _INCREMENT) & _MASK], numpy.uint64))[0]
    return int(state)


def _hash_values(values: Hashes) -> Hashes:
    """Hash each value with the finalizer of the SplitMix64 generator. Products wrap around."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> numpy.uint64(31))
    return mixed
