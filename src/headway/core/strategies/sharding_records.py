"""Records of models that were sharded: how they were sharded, and which shards have replaced their parameters.

A script may still refer to gathered parameters or to parameters from before prepare(). `ReplacedParameters` maps them
to their shards. `ShardedModels` records how models of this process were sharded, because a second prepare must request
an equal layout.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError


class ReplacedParameters:
    """Map from original or gathered parameters, which a script may still use, to the shards that have replaced them.

    Optimizers and gradient clipping use it to find the current parameters. Weak references to the old parameters show
    whether an ID still belongs to the parameter that was recorded.

    Args:
        models: Function that returns the strategy's sharded models.
    """

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._models = models
        # Pairs of (original parameter, shard), by the ID of the original.
        self._replacements: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        # Pairs of (gathered parameter, FSDP's record of it), by the ID of the gathered parameter.
        self._records_by_gathered: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        # Numbers of gathered parameters that were found, and of FSDP's records; -1 before the first search.
        self._num_gathered = -1
        self._num_records = 0

    def record_pairs(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record pairs of a parameter and the parameter that has replaced it."""
        self._replacements.update((id(original), (weakref.ref(original), shard)) for original, shard in pairs)

    def forget_gathered(self) -> None:
        """Discard the mapping of gathered parameters, because the strategy's models have changed."""
        self._records_by_gathered.clear()
        self._num_gathered = -1

    def forget_released(self) -> None:
        """Discard the mapping of parameters whose replacement no longer belongs to any model."""
        current_ids = {id(p) for model in self._models() for p in model.parameters()}
        self._replacements = {
            key: (original, shard) for key, (original, shard) in self._replacements.items() if id(shard) in current_ids
        }
        self.forget_gathered()

    def get_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter that has replaced `parameter`, or `parameter` itself if it was not replaced.

        For a gathered parameter, return the shard that it was gathered from.
        """
        replacement = self._replacements.get(id(parameter))
        if replacement is not None:
            original, shard = replacement
            if original() is parameter:
                return shard
        if is_dtensor(parameter):
            return parameter
        entry = self._records_by_gathered.get(id(parameter))
        if entry is None and self._num_gathered < self._num_records:
            self._record_gathered()  # a gathered parameter exists from its first gather on
            entry = self._records_by_gathered.get(id(parameter))
        if entry is None:
            return parameter
        gathered, record = entry
        return record.sharded_param if gathered() is parameter else parameter

    def _record_gathered(self) -> None:
        """Map each gathered parameter to FSDP's record of it.

        Gradient clipping and optimizer steps then find its shard.
        """
        self._records_by_gathered.clear()
        records = [record for model in self._models() for record in fsdp_state.iterate_records(model)]
        for record in records:
            gathered = fsdp_state.get_gathered_parameter(record)
            if gathered is not None:
                self._records_by_gathered[id(gathered)] = weakref.ref(gathered), record
        self._num_gathered = len(self._records_by_gathered)
        self._num_records = len(records)


class ShardedModels:
    """Registry of models that were sharded or split into stages, with their layouts.

    Models stay registered after they are released, because they stay sharded.
    """

    def __init__(self) -> None:
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __contains__(self, model: torch.nn.Module) -> bool:
        return model in self._records

    def record_model(self, model: torch.nn.Module, settings: tuple[object, ...], value: Any) -> None:
        """Record that a model was sharded.

        Args:
            model: Sharded model.
            settings: Layout and options with which it was sharded.
            value: Value that `find_record` returns if the model is prepared a second time.
        """
        self._records[model] = settings, value

    def find_record(self, model: torch.nn.Module, settings: tuple[object, ...]) -> Any:
        """Return the value that `record_model` recorded for a model, or None if the model was not sharded.

        Args:
            model: Model to prepare.
            settings: Layout and options with which it is prepared now.

        Raises:
            PrepareError: If the model was sharded with another layout or other options.
        """
        if model not in self._records:
            return None
        recorded_settings, value = self._records[model]
        if recorded_settings != settings:
            raise PrepareError(
                f"{type(model).__name__} is already sharded in another way ({', '.join(map(str, recorded_settings))}); "
                "build it again, and load its values from a checkpoint"
            )
        return value


class ShardedStages(ShardedModels):
    """Registry of pipeline stages that were separated from their model and then sharded."""
