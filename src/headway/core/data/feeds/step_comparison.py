"""Compare the samples of an iterable dataset that each rank reads in full, to detect ranks that read different data.

An iterable dataset can shuffle itself, split itself by rank, or end earlier on one rank than on another. This can be
detected only from its samples. In one step, every rank gets one batch. Ranks exchange a fingerprint of the raw samples
of each step, one step ahead. The exchange also informs all ranks of the end of the data, so that they end together. If
each rank reads different shards of a dataset, `row_count_exchange.RowCountExchange` does a similar exchange.
"""

from collections.abc import Iterator
from itertools import count

from headway.core.data.compare.fingerprint import (
    Fingerprint,
    FingerprintComparison,
    compare_fingerprints,
    describe_difference,
    hash_fingerprint,
)
from headway.core.data.feeds.stream_collate import CollatedStep
from headway.core.data.sampling.shard import mark_last
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

_REMEDY = (
    "Each rank reads the whole stream and keeps its share of every step, so the stream must be the same on every rank. "
    "Shuffle it by set_epoch or with one seed for all ranks, and do not split it by rank, or let rank 0 read for all: "
    "DataLoaderConfiguration(dispatch_batches=True). To let each rank read a part of its own, do not prepare() the loader"
)
_UNEQUAL_SAMPLES = "the iterable dataset %s is not the same on all ranks: in step %d, %s. %s"
_UNCLEAR_DIFFERENCE = (
    "samples of the iterable dataset %s differ between ranks: in step %d, %s. If each rank augments the same samples by a "
    "generator of its own, all is well. Otherwise samples are lost: %s"
)
_UNEQUAL_ENDS = (
    "the iterable dataset %s ends earlier on some ranks than on others (samples of step %d by rank: %s). The pass ends on all ranks "
    "before that step, so what other ranks have left is not read. %s"
)


class StepComparison:
    """Callable that wraps an iterator over batches, and compares the raw samples of each step on all ranks.

    It is used for iterable datasets that each rank reads in full. If the data ends earlier on one rank than on the
    others, the pass ends on all ranks together.

    Args:
        everyone: Collectives of the ranks that read the data.
        name: Name of the dataset's class, for messages.
    """

    def __init__(self, everyone: Collectives, name: str) -> None:
        self._everyone = everyone
        self._name = name
        self._ignored_paths: frozenset[str] = frozenset()

    def __call__(self, collated_steps: Iterator[CollatedStep]) -> Iterator[tuple[CollatedStep, bool]]:
        """Return an iterator over pairs of (this rank's `CollatedStep` item for one step, whether it is the last step).

        Args:
            collated_steps: `CollatedStep` items that this rank reads, one per step.

        Raises:
            DataError: If the ranks' samples differ by more than augmentation, or if the number of samples in the first
                step is not equal on all ranks. The iterator raises it on all ranks.
        """
        return mark_last(self._compare_steps(collated_steps))

    def _compare_steps(self, collated_steps: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        """Compare each step on all ranks, and yield it. Stop at the first step that some rank does not have."""
        for step_index in count():
            collated = next(collated_steps, None)
            if not self._is_step_on_all_ranks(collated, step_index) or collated is None:
                return
            yield collated

    def _is_step_on_all_ranks(self, collated: CollatedStep | None, step_index: int) -> bool:
        """Whether all ranks have the same number of samples in a step. If so, also compare fingerprints of the samples.

        Warn if the data ends earlier on some ranks than on others.

        Args:
            collated: This rank's samples in the step; None if its data is exhausted.
            step_index: Index of the step in the pass.

        Raises:
            DataError: On all ranks, if the samples differ by more than augmentation, or if the numbers of samples differ
                in the first step.
        """
        fingerprint = None if collated is None else collated.fingerprint
        own_hash = 0.0 if fingerprint is None else hash_fingerprint(fingerprint, self._ignored_paths)
        num_samples = 0 if collated is None else collated.num_samples
        sizes, hashes = zip(*self._everyone.gather_numbers([num_samples, own_hash]))
        if len(set(sizes)) > 1:
            details = self._name, step_index + 1, [int(size) for size in sizes], _REMEDY
            if step_index == 0:
                raise DataError(_UNEQUAL_ENDS % details)
            log.warning_once(_UNEQUAL_ENDS, *details)
            return False
        if len(set(hashes)) > 1:
            self._check_difference(fingerprint or {}, step_index)
        return True

    def _check_difference(self, own: Fingerprint, step_index: int) -> None:
        """Raise `DataError` if the ranks' samples differ by more than augmentation. Warn if that cannot be determined.

        Leaves (parts of a sample) that differ are ignored in later steps.

        Args:
            own: Fingerprint of this rank's samples.
            step_index: Index of the step in the pass.
        """
        fingerprints: list[Fingerprint] = self._everyone.gather_objects(own)
        comparison, paths = compare_fingerprints(fingerprints)
        if comparison is FingerprintComparison.DIFFERENT:
            difference = describe_difference(fingerprints, paths[0])
            raise DataError(_UNEQUAL_SAMPLES % (self._name, step_index + 1, difference, _REMEDY))
        if comparison is FingerprintComparison.UNCLEAR:
            difference = describe_difference(fingerprints, paths[0])
            log.warning_once(_UNCLEAR_DIFFERENCE, self._name, step_index + 1, difference, _REMEDY)
        # Leaves that differ by augmentation do so in every step. Floats that are only close have different hashes too,
        # so their leaves are ignored as well.
        all_paths = {path for fingerprint in fingerprints for path in fingerprint}
        first = fingerprints[0]
        self._ignored_paths |= {
            path for path in all_paths if any(each.get(path) != first.get(path) for each in fingerprints)
        }
