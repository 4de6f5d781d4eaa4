"""Determine which tensor of this rank receives the values of each saved tensor, and thus how it is sharded."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import encode_value
from headway.core.checkpoint.optimizer_state import list_parameter_keys
from headway.core.checkpoint.state import ROWS, StatefulObjects, describe_row, map_parameter_names
from headway.core.weights.pieces import is_sharded


class TargetLayout:
    """Layout into which a checkpoint is loaded: how this run shards each saved tensor.

    Args:
        objects: Objects that should load the checkpoint.
        rank: Rank of this process. Default: 0.
        world_size: Number of ranks of the run. Default: 1.
    """

    def __init__(self, objects: StatefulObjects, rank: int = 0, world_size: int = 1) -> None:
        self._rank = rank
        self._world_size = world_size
        self._weights: dict[str, Any] = {
            to_logical_name(f"model/{index}/{name}"): value
            for index, model in objects.list_models_to_load()
            for name, value in objects.export(model)
            if is_sharded(value)
        }
        names = map_parameter_names(objects.models)
        self._parameters: dict[str, Any] = {}
        for index, optimizer in enumerate(objects.optimizers):
            for group, keys in zip(optimizer.param_groups, list_parameter_keys(optimizer, names)):
                for parameter, key in zip(group["params"], keys):
                    part = objects.get_part(parameter)
                    if is_sharded(part):
                        self._parameters[f"optimizer/{index}/{key}"] = part
        # Sharded tensors in the states of the other objects, by the names under which a save would store them.
        tensors: dict[str, Any] = {}
        if self._weights or self._parameters:
            for kind, objects_of_kind in objects.others.items():
                for index, obj in enumerate(objects_of_kind):
                    with suppress(Exception):  # a state that cannot be saved now may still be loaded
                        encode_value(obj.state_dict(), f"{kind}/{index}", tensors)
        self._state = {name: each for name, each in tensors.items() if is_sharded(each)}

    def map_sharded(self, aliases: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Any]]:
        """Return, for the name of each saved tensor, a list of this rank's sharded tensors that receive its values.

        Saved tensors that this run does not shard are left out, and are read in full. An optimizer state that has its
        parameter's shape is sharded like the parameter. A tensor of a registered object keeps its current sharding.

        If this run shards no weights, the result contains only saved tensors with one row per rank. For each of them,
        this rank receives its own row. They are left out if the world size has changed.

        Args:
            aliases: Names of tied tensors, each mapped to the name of the tensor that holds their values.
            shapes: Shapes of the saved tensors by name.
        """
        if not self._weights and not self._parameters:
            # Of tensors with one row per rank, each rank reads its own row, if the world size is unchanged.
            rows = {name: shape for name, shape in shapes.items() if name.startswith(ROWS)}
            return {
                name: [describe_row(shape, self._rank)]
                for name, shape in rows.items()
                if shape[:1] == (self._world_size,)
            }
        targets: dict[str, list[Any]] = {}
        for name in (*shapes, *aliases):
            if name in self._weights:
                targets.setdefault(aliases.get(name, name), []).append(self._weights[name])
        for name, shape in shapes.items():
            own = self._state.get(name, self._find_parameter(name))
            if own is not None and tuple(own.shape) == shape:
                targets[name] = [own]
        return targets

    def _find_parameter(self, name: str) -> Any:
        """Return this rank's part of the sharded parameter to which an optimizer's tensor belongs, or None."""
        if not name.startswith("optimizer/"):
            return None
        prefix = name
        while prefix := prefix.rpartition("/")[0]:
            if prefix in self._parameters:
                return self._parameters[prefix]
        return None
