"""What stands in a checkpoint for tensors that it does not hold as the objects do: means under local SGD, digests of frozen weights.

What each rank has of its own under local SGD: models inside of a block, and the states of their optimizers. For all ranks there
are the means, with which a run goes on outside of a block and on other numbers of processes, and which tools read; beside them each
rank's own. A resumed run's models have the means until it enters its block again.

Frozen weights that a checkpoint names, with a digest of each, instead of holding them: a base beside its adapters. A digest is a
sum over a tensor's elements, each times an odd number that its place decides about. Ranks add what they have each for itself, so a
base has the same digests in every layout, and a change of any one element shows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headway.checkpoint.format.values import logical
from headway.checkpoint.state import ROWS, CollectedState, StatefulObjects, row_of
from headway.errors import CheckpointError
from headway.runtime.collectives.checked import Collectives
from headway.training.local_sgd import LocalTraining, means
from headway.training.prepared.prepare import Preparation
from headway.weights.pieces import ShardCutter, ShardPiece, TensorBox, held, is_dtensor, is_spread, memory_of
from headway.weights.shards import INTEGERS, dtype_name, raw_bytes


class LocalState:
    """Local SGD's part of a run's state.

    Args:
        training: which models are and were trained locally.
        preparation: the prepared objects.
        collectives: among all ranks.
    """

    def __init__(self, training: LocalTraining, preparation: Preparation, collectives: Collectives) -> None:
        self._training = training
        self._preparation = preparation
        self._collectives = collectives
        self._rows: dict[str, torch.Tensor] = {}

    def steps(self) -> list[int | None]:
        """For each model the steps of the block that it is in; None outside of any."""
        blocks = self._training.blocks
        return [blocks[each].num_steps if each in blocks else None for each in self._preparation.models]

    @property
    def has_parted(self) -> bool:
        """Do states differ between the ranks?"""
        return any(self._owned_by(index) for index in range(len(self._preparation.optimizers)))

    def add(self, collected: CollectedState, steps: Sequence[int | None]) -> None:
        """Let a state hold each rank's own, and the means in its place; every rank calls it."""
        inside = tuple(f"model/{index}/" for index, each in enumerate(steps) if each is not None)
        parted = tuple(
            f"optimizer/{index}/" for index in range(len(self._preparation.optimizers)) if self._owned_by(index)
        )
        tensors = collected.tensors
        own = {name: each for name, each in tensors.items() if name.startswith((*inside, *parted)) and each.numel()}
        floating = [name for name, each in own.items() if each.is_floating_point() and each.dtype.itemsize > 1]
        tensors.update(zip(floating, means([own[name] for name in floating], self._collectives)))
        rank, count = self._collectives.rank, self._collectives.world_size
        tensors.update((ROWS + name, row_of(each, rank, count)) for name, each in own.items())

    def take(self, found: CollectedState) -> None:
        """Of a state that was read, let this rank's optimizers have their own in place of the means.

        Raises:
            CheckpointError: a row is of another tensor than it says.
        """
        self._rows = {}
        for name in [name for name in found.tensors if name.startswith(ROWS)]:
            row, common = found.tensors.pop(name).boxes[0].values[0], name.removeprefix(ROWS)
            whole = found.tensors.get(common)
            if whole is None or (tuple(whole.shape), whole.dtype) != (tuple(row.shape), row.dtype):
                raise CheckpointError(
                    f"the manifest has {name} of {row.dtype} and {tuple(row.shape)}, and none such for all ranks"
                )
            self._rows[common] = row
            if common.startswith("optimizer/"):
                found.tensors[common] = row

    def take_up(self, parts: StatefulObjects, steps: Sequence[int | None]) -> None:
        """The state was taken up: let the blocks that it was saved in go on when they are entered."""
        rows, self._rows = self._rows, {}
        for index in range(len(self._preparation.optimizers)):
            if any(name.startswith(f"optimizer/{index}/") for name in rows):
                self._training.parted.update(self._owners(index))
        for (index, model), count in zip(parts.chosen(), steps):
            own = {logical(f"model/{index}/{name}"): value for name, value in parts.export(model)}
            pairs = [(own[name], row) for name, row in rows.items() if name in own]
            if count is not None and pairs:
                self._training.interrupt(self._preparation.models[index], count, partial(_put_back, pairs))

    def _owned_by(self, index: int) -> list[torch.nn.Module]:
        """The locally trained models that an optimizer is of."""
        return [model for model in self._owners(index) if model in self._training.parted]

    def _owners(self, index: int) -> list[torch.nn.Module]:
        groups = self._preparation.optimizers[index].optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        return [model for model in self._preparation.models if any(id(each) in held for each in model.parameters())]


@torch.no_grad()
def _put_back(pairs: Sequence[tuple[Any, torch.Tensor]]) -> None:
    for own, row in pairs:
        own.copy_(row)


_KEY = "frozen"
_ODD, _MIX, _WRAP = -7046029254386353131, -4417276706812531889, 2**64
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
        whole = INTEGERS[min(8, part.element_size())]
        words = raw_bytes(part).view(whole).view(part.numel(), -1).to(torch.int64)
        bits = words[:, 0] + words[:, 1:].sum(1) * _MIX  # complex128 has two
        mixed = place.reshape(-1) * _ODD
        total += int(((bits + 1) * ((mixed ^ (mixed >> 29)) * _MIX | 1)).sum())
    return total
