"""Which part of a sharded parameter stands for the tensor that a script holds: the one from before prepare(), or a gathered one.

The models of this process of which ranks hold parts: a second prepare must ask for the same layout.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headway.errors import PrepareError
from headway.strategies.fully_sharded import fsdp_state as gathered
from headway.weights.pieces import is_dtensor


class ReplacedParameters:
    """The parameters of a strategy's models, by what stood or stands in their place.

    Args:
        models: gives the strategy's sharded models.
    """

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._models = models
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._whole: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._num_whole, self._num_records = -1, 0

    def note(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Parameters from before, each with the one that has taken its place."""
        self._before.update((id(before), (weakref.ref(before), now)) for before, now in pairs)

    def look_again(self) -> None:
        """There are other models: gathered parameters are looked for anew."""
        self._whole.clear()
        self._num_whole = -1

    def forget(self) -> None:
        """Models are gone, and what has taken the place of their parameters."""
        held = {id(p) for model in self._models() for p in model.parameters()}
        self._before = {key: pair for key, pair in self._before.items() if id(pair[1]) in held}
        self.look_again()

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part that took its place; for a gathered parameter, which the tree shows while it is whole, its part."""
        known = self._before.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        if is_dtensor(parameter):
            return parameter
        found = self._whole.get(id(parameter))
        if found is None and self._num_whole < self._num_records:
            self._note_whole()  # each is there from its first gather on
            found = self._whole.get(id(parameter))
        if found is None or found[0]() is not parameter:
            return parameter
        part: torch.Tensor = found[1].sharded_param
        return part

    def _note_whole(self) -> None:
        """Which record each gathered parameter belongs to: clippings and steps look it up."""
        self._whole.clear()
        records = [record for model in self._models() for record in gathered.records(model)]
        for record in records:
            whole = gathered.whole_parameter(record)
            if whole is not None:
                self._whole[id(whole)] = weakref.ref(whole), record
        self._num_whole, self._num_records = len(self._whole), len(records)


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
