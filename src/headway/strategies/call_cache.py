"""What is remembered of calls with the same shapes and values: so many, the one that was not needed for longest goes first."""

from collections import Counter
from typing import Any, Generic, TypeVar

import torch

from headway.log import get_logger
from headway.runtime.collectives.tree import Tree, leaves, structure

log = get_logger(__name__)

CAPACITY = 256
"""How many are remembered."""

Signature = tuple[str, ...]
Value = TypeVar("Value")


class CallCache(Generic[Value]):
    """By (signature, whatever else decides).

    Args:
        what: what is to be found out anew each time, for the warning that there are too many.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._of: dict[tuple[Signature, Any], Value] = {}
        self._is_told = False

    def __len__(self) -> int:
        return len(self._of)

    def get(self, key: tuple[Signature, Any]) -> Value | None:
        """What is known, or None."""
        value = self._of.pop(key, None)
        if value is not None:
            self._of[key] = value  # the latest now
        return value

    def put(self, key: tuple[Signature, Any], value: Value) -> None:
        """Remember it, and warn once when others have to be forgotten for it."""
        if len(self._of) == CAPACITY:
            if not self._is_told:
                self._is_told = True
                self._warn()
            del self._of[next(iter(self._of))]
        self._of[key] = value

    def _warn(self) -> None:
        log.warning(
            "%d different batches have been seen, by shapes of tensors and values of numbers and text, and more are coming: %s. "
            "What changes most: %s. Give numbers that change as tensors, leave text out of the batch, and pad to fewer shapes",
            CAPACITY,
            self._what,
            _changing([signature for signature, _ in self._of]),
        )


def _changing(signatures: list[Signature]) -> str:
    """The entry with the most values among signatures of the commonest structure, as "an int (entry 2 of 3)"."""
    ((commonest, _),) = Counter(each[0] for each in signatures).most_common(1)
    columns = list(zip(*(each[1:] for each in signatures if each[0] == commonest)))
    counts = [len(set(column)) for column in columns]
    if not counts or max(counts) == 1:
        return "how the batch is nested, or whether its gradients are wanted"
    number = counts.index(max(counts))
    return f"{columns[number][0].partition(' ')[0]} (entry {number + 1} of {len(columns)} in {commonest})"


def signature(tree: Tree) -> Signature:
    """How it is nested, then each leaf: kind, and a tensor's shape and dtype; numbers and text by value."""
    return structure(tree), *map(_leaf, leaves(tree))


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"shape {leaf.dtype}{tuple(leaf.shape)}"
    name = type(leaf).__name__
    return f"{name} {leaf!r}" if isinstance(leaf, int | float | str | bool | None) else name
