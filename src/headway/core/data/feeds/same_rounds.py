"""Compare the samples of an iterable dataset that each rank reads in full, to detect ranks that read different data.

An iterable dataset can shuffle itself, split itself by rank, or end earlier on one rank than on another. This can be
detected only from its samples. In one step (also called round), every rank gets one batch. Ranks exchange a fingerprint
of the raw samples of each step, one step ahead. The exchange also informs all ranks of the end of the data, so that
they end together. If each rank reads different shards of a dataset, `shared_rounds.SharedRounds` does a similar
exchange.
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
from headway.core.data.feeds.stream import CollatedStep
from headway.core.data.sampling.shard import mark_last
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

_REMEDY = (
    "Each rank reads the whole stream and keeps its share of every round, so the stream must be the same on every rank. "
    "Shuffle it by set_epoch or with one seed for all ranks, and do not split it by rank, or let rank 0 read for all: "
    "DataLoaderConfiguration(dispatch_batches=True). To let each rank read a part of its own, do not prepare() the loader"
)
_UNEQUAL_SAMPLES = "the iterable dataset %s is not the same on all ranks: in round %d, %s. %s"
_UNCLEAR = (
    "samples of the iterable dataset %s differ between ranks: in round %d, %s. If each rank augments the same samples by a "
    "generator of its own, all is well. Otherwise samples are lost: %s"
)
_ENDS = (
    "the iterable dataset %s ends earlier on some ranks than on others (samples of round %d by rank: %s). The pass ends on all ranks "
    "before that round, so what other ranks have left is not read. %s"
)


class SameRounds:
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
        self._ignored: frozenset[str] = frozenset()

    def __call__(self, parts: Iterator[CollatedStep]) -> Iterator[tuple[CollatedStep, bool]]:
        """Return an iterator over pairs of (this rank's `CollatedStep` item for one step, whether it is the last step).

        Args:
            parts: `CollatedStep` items that this rank reads, one per step.

        Raises:
            DataError: If the ranks' samples differ by more than augmentation, or if the number of samples in the first
                step is not equal on all ranks. The iterator raises it on all ranks.
        """
        return mark_last(self._compare_rounds(parts))

    def _compare_rounds(self, parts: Iterator[CollatedStep]) -> Iterator[CollatedStep]:
        for number in count():
            part = self._compare_round(next(parts, None), number)
            if part is None:
                return
            yield part

    def _compare_round(self, part: CollatedStep | None, number: int) -> CollatedStep | None:
        fingerprint = None if part is None else part.fingerprint
        own = 0.0 if fingerprint is None else hash_fingerprint(fingerprint, self._ignored)
        num_samples = 0 if part is None else part.num_samples
        sizes, hashes = zip(*self._everyone.gather_numbers([num_samples, own]))
        if len(set(sizes)) > 1:
            told = self._name, number + 1, [int(size) for size in sizes], _REMEDY
            if not number:
                raise DataError(_ENDS % told)
            log.warning_once(_ENDS, *told)
            return None
        if len(set(hashes)) > 1:
            self._check_difference(fingerprint or {}, number)
        return part

    def _check_difference(self, own: Fingerprint, number: int) -> None:
        """Raise `DataError` if the ranks' samples differ by more than augmentation. Warn if that cannot be determined.

        Leaves (parts of a sample) that differ are ignored in later steps.

        Args:
            own: Fingerprint of this rank's samples.
            number: Index of the step in the pass.
        """
        ranks: list[Fingerprint] = self._everyone.gather_objects(own)
        likeness, paths = compare_fingerprints(ranks)
        if likeness is FingerprintComparison.DIFFERENT:
            found = describe_difference(ranks, paths[0])
            raise DataError(_UNEQUAL_SAMPLES % (self._name, number + 1, found, _REMEDY))
        if likeness is FingerprintComparison.UNCLEAR:
            found = describe_difference(ranks, paths[0])
            log.warning_once(_UNCLEAR, self._name, number + 1, found, _REMEDY)
        # Leaves that differ by augmentation do so in every round. Floats that are only close have different hashes too,
        # so their leaves are ignored as well.
        self._ignored |= {path for path in ranks[0] if any(each.get(path) != ranks[0][path] for each in ranks)}
        self._ignored |= {path for each in ranks for path in each if path not in ranks[0]}
