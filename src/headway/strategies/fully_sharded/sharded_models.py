"""The models of this process that a layout has sharded: a second prepare must ask for the same."""

import weakref
from typing import Any

import torch

from headway.errors import PrepareError
from headway.strategies.tensor.tensor_parallel import TensorParallel


class ShardedModels:
    """The models that were sharded in this process, and how."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._cuts: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()

    def note(self, model: torch.nn.Module, how: Any, cut: TensorParallel | None) -> None:
        """It has been sharded; weakly, because what cut it holds the model, whose hooks hold what needs it."""
        self._known[model] = how
        if cut is not None:
            self._cuts[model] = weakref.ref(cut)

    def cut_of(self, model: torch.nn.Module) -> TensorParallel | None:
        """What has cut its matrices, where any of that reaches beyond the model."""
        found = self._cuts.get(model)
        return None if found is None else found()

    def is_sharded(self, model: torch.nn.Module, how: Any) -> bool:
        """Has it been sharded before, in this very way?

        Raises:
            PrepareError: it was sharded in another way.
        """
        before = self._known.get(model)
        if before is not None and before != how:
            raise PrepareError(
                f"{type(model).__name__} is already sharded in another way ({before[0]}, {before[1]}, mixed_precision="
                f"{before[2]!r}); build it again, and load its values from a checkpoint"
            )
        return before is not None
