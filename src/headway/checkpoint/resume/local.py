"""What each rank has of its own under local SGD, in checkpoints: models inside of a block, and the states of their optimizers.

For all ranks there are the means, with which a run goes on outside of a block and on other numbers of processes, and which tools
read; beside them each rank's own. A resumed run's models have the means until it enters its block again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from headway.checkpoint.format.values import logical
from headway.checkpoint.state import ROWS, CollectedState, StatefulObjects, row_of
from headway.errors import CheckpointError
from headway.runtime.collectives.checked import Collectives
from headway.training.local_sgd import LocalTraining, means
from headway.training.prepared.prepare import Preparation


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
