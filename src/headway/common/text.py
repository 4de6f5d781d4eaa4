"""Names in messages."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
