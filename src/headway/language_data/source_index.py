"""Entry of a mixture's samples that contains the index of their source."""

from collections.abc import Mapping
from typing import Any

from headway.errors import DataError

SOURCE_KEY = "source"
"""Entry of a sample or a batch that contains the index of the source in `Mixture.names`."""


def attach_source(sample: Any, source: int, adds_source: bool | None) -> Any:
    """Return a sample to which the index of its source has been added, if requested.

    A mapping becomes a dict with the entry "source". A tuple gets the index as its last item. Any other sample becomes
    a pair of (sample, index). If no index is to be added, the sample is returned unchanged.

    Args:
        sample: Sample of the source.
        source: Index of the source.
        adds_source: Whether to add the index. None: only to a mapping.

    Raises:
        DataError: If the sample is a mapping that already has an entry "source", and `adds_source` is not False.
    """
    # Check for a dict first: the check for an abstract class takes longer than the rest of this function.
    if type(sample) is dict or isinstance(sample, Mapping):
        if adds_source is False:
            return sample
        if SOURCE_KEY in sample:
            raise DataError(
                f"a sample already has the entry {SOURCE_KEY!r}, which a Mixture adds; rename the entry, or pass adds_source=False"
            )
        return {**sample, SOURCE_KEY: source}
    if not adds_source:
        return sample
    return (*sample, source) if isinstance(sample, tuple) else (sample, source)
