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
        self._joined: Any = None
        self._begins: list[int] = []
        self._versions: list[Any] | None = None

    def read(self, found: Sequence[tuple[int, int]]) -> list[Any] | None:
        """Return samples of several sources, in the order of `found`, or None if they cannot be read together.

        Args:
            found: Pairs of (index of the source, index of the sample in this source), one per sample.
        """
        versions = [getattr(source, "_fingerprint", None) for source in self._sources]  # changes with the format
        if versions != self._versions:
            self._versions = versions
            self._joined = self._join_sources() if None not in versions and len(versions) > 1 else None
        if self._joined is None:
            return None
        begins = self._begins
        samples: list[Any] = self._joined.__getitems__([begins[source] + index for source, index in found])
        return samples

    def _join_sources(self) -> Any:
        import datasets

        first, *others = self._sources
        if any(type(source) is not datasets.Dataset or source._indices is not None for source in self._sources):
            return None
        if any(other.features != first.features or other.format != first.format for other in others):
            return None
        self._begins = numpy.cumsum([0, *map(len, self._sources)]).tolist()
        return datasets.concatenate_datasets(list(self._sources))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joined": None, "_versions": None}
