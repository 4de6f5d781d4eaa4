"""Frozen weights that a checkpoint names, with a digest of each, instead of holding them: a base beside its adapters.

A digest is a sum over a tensor's elements, each times an odd number that its place decides about. Ranks add what they have each
for itself, so a base has the same digests in every layout, and a change of any one element shows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from headway.checkpoint.format.values import logical
from headway.checkpoint.state import CollectedState, StatefulObjects
from headway.errors import CheckpointError
from headway.runtime.collectives.checked import Collectives
from headway.weights.pieces import ShardCutter, ShardPiece, TensorBox, held, is_dtensor, is_spread, memory_of
from headway.weights.shards import dtype_name, raw_bytes

_KEY = "frozen"
_ODD, _MIX, _WRAP = -7046029254386353131, -4417276706812531889, 2**64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**20
"""Elements that are looked at at once."""


class FrozenWeights:
    """The frozen weights of a run's models.

    Args:
        everyone: all ranks.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone
        self._known: dict[str, tuple[Any, list[Any]]] = {}

    def take_out(self, collected: CollectedState, models: Iterable[torch.nn.Module], is_alone: bool) -> None:
        """Put names and digests where the values are; every rank calls it, or, with `is_alone`, one that has whole ones."""
        frozen = {
            logical(f"model/{index}/{name}")
            for index, model in enumerate(models)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }
        # What quantised weights keep beside them is named after them.
        names = [name for name in collected.tensors if frozen & {name, *_around(name)}]
        told = self._digests({name: collected.tensors.pop(name) for name in names}, is_alone)
        gone = {tied: name for tied, name in collected.aliases.items() if name in told}
        collected.aliases = {tied: name for tied, name in collected.aliases.items() if tied not in gone}
        collected.state[_KEY] = told | {tied: told[name] for tied, name in gone.items()}

    def put_back(self, found: CollectedState, parts: StatefulObjects) -> StatefulObjects:
        """The objects without what the checkpoint only names, which is here already; every rank calls it.

        Raises:
            CheckpointError: it is not the same here.
        """
        named = found.state.pop(_KEY, {})
        if not isinstance(named, dict):
            raise CheckpointError("the manifest's frozen weights are nothing that was saved")
        if not named:
            return parts
        own = {
            key: value
            for index, model in enumerate(parts.models)
            for name, value in parts.export(model)
            if (key := logical(f"model/{index}/{name}")) in named
        }
        here = self._digests(own, is_alone=False)
        odd = [name for name in named if here.get(name) != named[name]]
        if odd:
            raise CheckpointError(
                f"the checkpoint holds no frozen weights, only their names and digests (save_frozen=False), and {len(odd)} of "
                f"{len(named)} are others here, or missing: {', '.join(odd[:3])}. Build the model on the base that it was saved "
                "with, before load_state()"
            )
        numbers = {id(model): index for index, model in enumerate(parts.models)}

        def rest(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
            prefix = f"model/{numbers[id(model)]}/"
            return ((name, value) for name, value in parts.export(model) if logical(prefix + name) not in named)

        return replace(parts, export=rest)

    def _digests(self, tensors: dict[str, Any], is_alone: bool) -> dict[str, list[Any]]:
        """By name: shape, dtype and digest; those that have not changed are known."""
        keys = {name: (memory_of(value), held(value)._version) for name, value in tensors.items()}
        new = [name for name, key in keys.items() if name not in self._known or self._known[name][0] != key]
        lists = [new] if is_alone else self._everyone.gather_objects(new)
        new = [name for name in tensors if any(name in each for each in lists)]
        cutter = ShardCutter()
        pieces = {name: cutter.piece(value) if is_dtensor(value) else value for name, value in tensors.items()}
        sums = [_sum(pieces[name]) for name in new]
        every = [sums] if is_alone else self._everyone.gather_objects(sums)
        for number, name in enumerate(new):
            value = tensors[name]
            terms = [each[number] for each in every] if is_spread(value) else [sums[number]]
            digest = f"{sum(terms) % _WRAP:016x}"
            self._known[name] = keys[name], [list(value.shape), dtype_name(value.dtype), digest]
        return {name: self._known[name][1] for name in tensors}


def _around(name: str) -> tuple[str, str]:
    outer = name.rpartition(".")[0]
    return outer, outer.rpartition(".")[0]


def _sum(value: Any) -> int:
    """This rank's term."""
    if not isinstance(value, ShardPiece):
        value = ShardPiece(tuple(value.shape), value.dtype, (TensorBox((0,) * value.ndim, value, True),))
    strides = torch.empty(value.shape, device="meta").stride()
    return sum(_box_sum(box, strides) for box in value.boxes if box.is_written)


def _box_sum(box: TensorBox, strides: tuple[int, ...]) -> int:
    rows, offsets = (box.values, box.offsets) if box.values.ndim else (box.values.reshape(1), (0,))
    step = max(1, _BLOCK // max(1, rows[:1].numel()))
    total = 0
    for start in range(0, len(rows) if rows.numel() else 0, step):
        part = rows[start : start + step]
        place = torch.zeros((), dtype=torch.int64)
        for dim, (offset, stride) in enumerate(zip(offsets, strides or (1,))):
            first = offset + (start if dim == 0 else 0)
            place = place[..., None] + torch.arange(first, first + part.shape[dim]) * stride
        whole = _INTEGERS[min(8, part.element_size())]
        words = raw_bytes(part).view(whole).view(part.numel(), -1).to(torch.int64)
        bits = words[:, 0] + words[:, 1:].sum(1) * _MIX  # complex128 has two
        mixed = place.reshape(-1) * _ODD
        total += int(((bits + 1) * ((mixed ^ (mixed >> 29)) * _MIX | 1)).sum())
    return total
