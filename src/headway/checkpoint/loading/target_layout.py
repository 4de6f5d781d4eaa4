"""How this run spreads what a checkpoint holds: for each saved tensor, the tensor of this rank that it will be put into or beside."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headway.checkpoint.format.values import encode, logical
from headway.checkpoint.optimizers import parameter_keys
from headway.checkpoint.rows import ROWS, place_of
from headway.checkpoint.state import StatefulObjects, parameter_names
from headway.weights.pieces import is_spread


class TargetLayout:
    """The layout of this run.

    Args:
        parts: the objects that a checkpoint is loaded into.
        rank: this one.
        world_size: ranks of the run.
    """

    def __init__(self, parts: StatefulObjects, rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self._weights: dict[str, Any] = {
            logical(f"model/{index}/{name}"): value
            for index, model in parts.chosen()
            for name, value in parts.export(model)
            if is_spread(value)
        }
        names = parameter_names(parts.models)
        self._parameters: dict[str, Any] = {
            f"optimizer/{index}/{key}": part
            for index, optimizer in enumerate(parts.optimizers)
            for group, keys in zip(optimizer.param_groups, parameter_keys(optimizer, names))
            for parameter, key in zip(group["params"], keys)
            if is_spread(part := parts.part_of(parameter))
        }
        self._state = self._other_state(parts) if self._weights or self._parameters else {}

    @staticmethod
    def _other_state(parts: StatefulObjects) -> dict[str, Any]:
        """What is spread in the states of the other objects, by the names under which a save would keep it."""
        tensors: dict[str, Any] = {}
        for kind, objects in parts.others.items():
            for index, obj in enumerate(objects):
                with suppress(Exception):  # what cannot be saved as it is now may be loaded all the same
                    encode(obj.state_dict(), f"{kind}/{index}", tensors)
        return {name: each for name, each in tensors.items() if is_spread(each)}

    def like(self, aliases: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Any]]:
        """For each saved tensor that is spread here, the own tensors that are spread as it will be.

        What an optimizer keeps of a parameter, and has its shape, is spread as the parameter is; what a registered object keeps, as
        it is spread now. Anything else comes whole.

        Args:
            aliases: tied names, and the name that holds their values.
            shapes: of the saved tensors.
        """
        if not self._weights and not self._parameters:
            # What each rank had of its own, where there are as many of them.
            rows = {name: shape for name, shape in shapes.items() if name.startswith(ROWS)}
            return {n: [place_of(shape, self._rank)] for n, shape in rows.items() if shape[:1] == (self._world_size,)}
        found: dict[str, list[Any]] = {}
        for name in (*shapes, *aliases):
            if name in self._weights:
                found.setdefault(aliases.get(name, name), []).append(self._weights[name])
        for name, shape in shapes.items():
            own = self._state.get(name, self._parameter(name))
            if own is not None and tuple(own.shape) == shape:
                found[name] = [own]
        return found

    def _parameter(self, name: str) -> Any:
        if not name.startswith("optimizer/"):
            return None
        prefix = name
        while prefix := prefix.rpartition("/")[0]:
            if prefix in self._parameters:
                return self._parameters[prefix]
        return None
