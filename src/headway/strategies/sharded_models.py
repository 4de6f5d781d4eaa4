"""The models of this process of which ranks hold parts: a second prepare must ask for the same layout."""

import weakref
from typing import Any

import torch

from headway.errors import PrepareError


class ShardedModels:
    """The models that were sharded, or cut into stages, and how; they stay so when they are released."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __contains__(self, model: torch.nn.Module) -> bool:
        return model in self._known

    def note(self, model: torch.nn.Module, how: tuple[object, ...], kept: Any) -> None:
        """It has been sharded in this way; `kept` is what a second prepare takes up."""
        self._known[model] = how, kept

    def find(self, model: torch.nn.Module, how: tuple[object, ...]) -> Any:
        """What was kept of it; None where it has not been sharded.

        Raises:
            PrepareError: it was, in another way.
        """
        before, kept = self._known.get(model, (how, None))
        if before != how:
            raise PrepareError(
                f"{type(model).__name__} is already sharded in another way ({', '.join(map(str, before))}); build it again, and load "
                "its values from a checkpoint"
            )
        return kept
