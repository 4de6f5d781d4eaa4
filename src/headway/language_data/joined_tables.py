"""Read samples from several tables of the `datasets` library in one query, about as fast as from one table."""

from collections.abc import Sequence
from typing import Any

import numpy


class JoinedTables:
    """Reader that gets samples of several sources of a mixture in one query.

    All sources must be `datasets.Dataset`s with equal columns and formats. Their tables are concatenated at the first
    read in each process, without a copy. Datasets with an indices mapping, such as those that `select` or `shuffle`
    return, cannot be read in this way, because a concatenation would copy the mapping.

    Args:
        sources: Sources of a mixture.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self._sources = sources
        self._joined: Any = None  # concatenation of the sources; None if they cannot be read together
        self._starts: list[int] = []  # index in `_joined` of each source's first sample
        self._fingerprints: list[Any] | None = None  # of the sources when they were concatenated

    def read(self, locations: Sequence[tuple[int, int]]) -> list[Any] | None:
        """Return samples of several sources, in the order of `locations`, or None if they cannot be read together.

        Args:
            locations: Pairs of (index of the source, index of the sample in this source), one per sample.
        """
        # A dataset's fingerprint changes when the script sets another format. Other datasets have no fingerprint.
        fingerprints = [getattr(source, "_fingerprint", None) for source in self._sources]
        if fingerprints != self._fingerprints:
            self._fingerprints = fingerprints
            self._joined = self._join_sources() if None not in fingerprints and len(fingerprints) > 1 else None
        if self._joined is None:
            return None
        starts = self._starts
        samples: list[Any] = self._joined.__getitems__([starts[source] + index for source, index in locations])
        return samples

    def _join_sources(self) -> Any:
        """Return the concatenation of the sources; None if they are not tables with equal columns and formats."""
        import datasets

        first, *others = self._sources
        if any(type(source) is not datasets.Dataset or source._indices is not None for source in self._sources):
            return None
        if any(other.features != first.features or other.format != first.format for other in others):
            return None
        self._starts = numpy.cumsum([0, *map(len, self._sources)]).tolist()
        return datasets.concatenate_datasets(list(self._sources))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joined": None, "_fingerprints": None}
