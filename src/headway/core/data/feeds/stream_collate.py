"""Collate function of `StreamFeed`: it gets the raw samples of one step on all ranks, and collates only some ranks' slices.

In one step, every rank gets one batch. The function runs in the workers, if the loader has any.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from headway.core.data.compare.fingerprint import Fingerprint, pick_samples, take_fingerprint
from headway.core.data.feeds.protocol import UNCOUNTABLE
from headway.core.data.sampling.shard import RankBatch, SampleSplit, UpdateSplit
from headway.core.runtime.collectives.tree import copy_containers, find_batch_size
from headway.errors import DataError


class CollatedStep(NamedTuple):
    """Result of the collate function for one step, in which every rank gets one batch.

    Attributes:
        batches: One batch for each rank for which this process reads; empty if the step is skipped.
        rank_batches: `RankBatch` of each batch, with its row counts.
        num_samples: Number of non-padding samples in the step on all ranks. If the loader does not batch, the
            dataset's items are counted.
        state: State of the StatefulDataLoader after this step, or of the dataset if it is saved; None if neither is
            needed.
        fingerprint: Fingerprint of some samples; None if ranks do not compare their data.
        leftovers: Last raw samples of a worker, if they are too few for a step. The leftovers of several workers
            together may be enough for one. None for a regular step.
    """

    batches: list[Any]
    rank_batches: list[RankBatch]
    num_samples: int
    state: Any = None
    fingerprint: Fingerprint | None = None
    leftovers: list[Any] | None = None


StepMarker = Callable[[Iterator[CollatedStep]], Iterator[tuple[CollatedStep, bool]]]
"""Function that marks the last step in an iterator over `CollatedStep` objects, one per step.

It returns an iterator over pairs of (`CollatedStep` of one step, whether it is the last step).
"""


class StreamCollate:
    """Collate function that receives the samples of all ranks for one step, and collates only the slices of some ranks.

    It is pickled to workers, and has separate state in each of them.

    Args:
        collate_fn: User's collate function.
        split: Rule that divides the samples of one step among the ranks.
        ranks: Ranks whose slices to collate.
        is_batched: Whether a slice consists of several samples. Otherwise it is one item of the dataset, which already
            is a batch.

    Attributes:
        collate_fn: User's collate function. The script can replace it between passes.
        split: Rule that divides the samples of one step among the ranks.
        ranks: Ranks whose slices to collate.
        is_batched: Whether a slice consists of several samples.
        takes_fingerprints: Whether to add a fingerprint of some raw samples to each result.
        returns_leftovers: Whether to return samples uncollated if there are too few of them for one step.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], split: SampleSplit | UpdateSplit, ranks: Sequence[int], is_batched: bool
    ) -> None:
        self.collate_fn = collate_fn
        self.split = split
        self.ranks = ranks
        self.is_batched = is_batched
        self.takes_fingerprints = False
        self.returns_leftovers = False
        self.start_pass()

    def start_pass(self, num_skipped_steps: int = 0, num_skipped_samples: int = 0) -> None:
        """Start a pass, and set the samples to skip at its start.

        Args:
            num_skipped_steps: Number of steps whose samples are not collated. Default: 0.
            num_skipped_samples: Number of samples to drop from the first step after the skipped ones. Default: 0.
        """
        self._num_skipped_steps = num_skipped_steps
        self._num_skipped_samples = num_skipped_samples
        self._is_skipping = num_skipped_steps > 0 or num_skipped_samples > 0
        self._num_calls = 0
        self._first_samples: list[Any] | None = None

    def __call__(self, samples: list[Any]) -> CollatedStep:
        """Collate the slices of this process's ranks from the raw samples of one step on all ranks.

        The result has no batches if the step is skipped, or if its samples are too few and `returns_leftovers` is set.
        """
        if self.returns_leftovers and len(samples) < (self.split.samples_per_step or 0):
            return CollatedStep([], [], 0, leftovers=samples)
        if self._first_samples is None:
            self._first_samples = copy_containers(samples) if self.split.even_batches else []
        if self._is_skipping:
            step_index = self._count_call()
            if step_index < self._num_skipped_steps:
                return CollatedStep([], [], len(samples))
            self._is_skipping = False
            if step_index == self._num_skipped_steps:
                samples = samples[self._num_skipped_samples :]
        return self.collate_step(samples, self._first_samples) if samples else CollatedStep([], [], 0)

    def _count_call(self) -> int:
        """Return the index, within the pass, of the step that is being collated.

        Workers produce steps round-robin, so the index depends on the worker.
        """
        worker = get_worker_info()
        step_index = self._num_calls if worker is None else self._num_calls * worker.num_workers + worker.id
        self._num_calls += 1
        return step_index

    def collate_step(self, samples: list[Any], first_samples: list[Any]) -> CollatedStep:
        """Collate the slices of this process's ranks from the raw samples of one step.

        Args:
            samples: Raw samples of the step on all ranks.
            first_samples: First samples of the epoch, with which an incomplete step is padded.
        """
        # Take it before the user's collate function, which may change the samples.
        fingerprint = take_fingerprint(pick_samples(samples)) if self.takes_fingerprints else None
        is_full, num_samples = len(samples) == self.split.samples_per_step, len(samples)
        batches, rank_batches = [], []
        item_rows = None if self.is_batched else self._count_rows_by_rank(samples)
        for rank in self.ranks:
            rank_samples, sample_counts = self.split.get_rank_samples(samples, rank, first_samples)
            if not is_full:
                # A collate function may modify its samples, so a repeated sample must be a separate copy.
                rank_samples = copy_containers(rank_samples)
            if self.is_batched:
                batch = self.collate_fn(rank_samples)
                rank_batch = RankBatch([], len(rank_samples), sample_counts, num_samples, False)
            else:
                batch = self.collate_fn(rank_samples[0])
                rank_batch = RankBatch([], find_batch_size(batch), item_rows, num_samples, False)
            batches.append(batch)
            rank_batches.append(rank_batch)
        return CollatedStep(batches, rank_batches, num_samples, fingerprint=fingerprint)

    def _count_rows_by_rank(self, items: list[Any]) -> tuple[int, ...] | None:
        """Return the number of rows in each rank's item; 0 for a rank without an item.

        Return None if the rows cannot be counted and there is only one rank.

        Raises:
            DataError: If the rows of an item cannot be counted and there are several ranks.
        """
        rows: list[int] = []
        for item in items:
            num_rows = self._count_item_rows(item)
            if num_rows is None:
                if self.split.num_ranks == 1:
                    return None
                raise DataError(UNCOUNTABLE.format(what=f"an item of type {type(item).__name__}"))
            rows.append(num_rows)
        return (*rows, *[0] * (self.split.num_ranks - len(rows)))

    def _count_item_rows(self, item: object) -> int | None:
        """Return the number of rows in an item that the dataset has batched itself, or None if it cannot be determined."""
        num_rows = find_batch_size(item)
        # The collate function may convert, for example, lists to tensors, whose rows can be counted.
        return find_batch_size(self.collate_fn(item)) if num_rows is None else num_rows
