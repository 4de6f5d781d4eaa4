"""State that differs between ranks under local SGD, as checkpoints store it.

Under local SGD, ranks have different models inside a local SGD block, and different optimizer states. The checkpoint
holds the means over all ranks. Tools use them, and so does a run that continues outside a block or with another world
size. The checkpoint also holds each rank's own values. The models of a resumed run have the means until the run enters
the block again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.state import ROWS, CollectedState, StatefulObjects, make_own_row
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.local_blocks import LocalTraining, iterate_averages
from headway.core.training.prepared.prepare import Preparation
from headway.errors import CheckpointError


class LocalSGDState:
    """Collector and restorer of the state that differs between ranks under local SGD.

    In a checkpoint, each such tensor is stored with one row per rank. In addition, a floating-point tensor of at least
    16 bits is stored as its mean over the ranks. Any other tensor is stored with this rank's own values.

    Args:
        training: Registry of the run's local SGD blocks.
        preparation: Prepared objects.
        collectives: Collectives over all ranks.
    """

    def __init__(self, training: LocalTraining, preparation: Preparation, collectives: Collectives) -> None:
        self._training = training
        self._preparation = preparation
        self._collectives = collectives
        self._rows: dict[str, torch.Tensor] = {}
        """This rank's values in a loaded state, by logical name, until `resume_blocks` uses them."""

    def list_steps(self) -> list[int | None]:
        """Return, for each model, the number of steps made in its local SGD block. None if it is in no such block."""
        blocks = self._training.blocks
        return [blocks[each].num_steps if each in blocks else None for each in self._preparation.models]

    @property
    def has_diverged(self) -> bool:
        """Whether optimizer states differ between the ranks, because of local SGD."""
        return any(self._find_diverged_models(index) for index in range(len(self._preparation.optimizers)))

    def add_rank_values(self, collected: CollectedState, steps: Sequence[int | None]) -> None:
        """Replace each tensor that differs between ranks with its mean, and add a tensor with every rank's values.

        The added tensor has one row per rank. Its name begins with `ROWS`. Only floating-point tensors of at least 16
        bits are averaged. Others keep each rank's own values. Every rank must call this method.

        Args:
            collected: State to change.
            steps: For each model, the number of steps made in its local SGD block. None if it is in no such block. Only
                weights of models in a block are changed.
        """
        model_prefixes = tuple(f"model/{index}/" for index, each in enumerate(steps) if each is not None)
        optimizer_prefixes = tuple(
            f"optimizer/{index}/"
            for index in range(len(self._preparation.optimizers))
            if self._find_diverged_models(index)
        )
        tensors = collected.tensors
        prefixes = (*model_prefixes, *optimizer_prefixes)
        own = {name: each for name, each in tensors.items() if name.startswith(prefixes) and each.numel()}
        floating = [name for name, each in own.items() if each.is_floating_point() and each.dtype.itemsize > 1]
        tensors.update(zip(floating, iterate_averages([own[name] for name in floating], self._collectives)))
        rank, count = self._collectives.rank, self._collectives.world_size
        tensors.update((ROWS + name, make_own_row(each, rank, count)) for name, each in own.items())

    def replace_means(self, saved_state: CollectedState) -> None:
        """Replace the means of optimizer states in a loaded state with this rank's own values.

        This rank's values of weights are kept for `resume_blocks`. In the loaded state, weights remain means. The
        tensors with one row per rank are removed.

        Args:
            saved_state: Loaded state to change. It has only this rank's row of each tensor with one row per rank.

        Raises:
            CheckpointError: If this rank's values do not match the shape and dtype of the mean.
        """
        self._rows = {}
        for name in [name for name in saved_state.tensors if name.startswith(ROWS)]:
            row, mean_name = saved_state.tensors.pop(name).boxes[0].values[0], name.removeprefix(ROWS)
            mean = saved_state.tensors.get(mean_name)
            if mean is None or (tuple(mean.shape), mean.dtype) != (tuple(row.shape), row.dtype):
                raise CheckpointError(
                    f"the manifest has {name} of {row.dtype} and {tuple(row.shape)}, and none such for all ranks"
                )
            self._rows[mean_name] = row
            if mean_name.startswith("optimizer/"):
                saved_state.tensors[mean_name] = row

    def resume_blocks(self, objects: StatefulObjects, steps: Sequence[int | None]) -> None:
        """Set the step at which each local SGD block continues when it is entered, and this rank's weights for it.

        Call it after `replace_means`, and after the state has been restored.

        Args:
            objects: Restored objects.
            steps: For each model, the number of steps made in its block in the saved run. None: the model was not in a
                block.
        """
        rows, self._rows = self._rows, {}
        for index in range(len(self._preparation.optimizers)):
            if any(name.startswith(f"optimizer/{index}/") for name in rows):
                self._training.diverged.update(self._find_trained_models(index))
        for (index, model), count in zip(objects.list_models_to_load(), steps):
            if count is None:
                continue
            own = {to_logical_name(f"model/{index}/{name}"): value for name, value in objects.export(model)}
            pairs = [(own[name], row) for name, row in rows.items() if name in own]
            if pairs:
                self._training.record_interruption(self._preparation.models[index], count, partial(_copy_rows, pairs))

    def _find_diverged_models(self, index: int) -> list[torch.nn.Module]:
        """Return the models that an optimizer updates and whose optimizer states differ between ranks.

        Args:
            index: Index of the optimizer.
        """
        return [model for model in self._find_trained_models(index) if model in self._training.diverged]

    def _find_trained_models(self, index: int) -> list[torch.nn.Module]:
        """Return the prepared models of which the optimizer with this index trains at least one parameter."""
        groups = self._preparation.optimizers[index].optimizer.param_groups
        ids = {id(parameter) for group in groups for parameter in group["params"]}
        return [model for model in self._preparation.models if any(id(each) in ids for each in model.parameters())]


@torch.no_grad()
def _copy_rows(pairs: Sequence[tuple[Any, torch.Tensor]]) -> None:
    for own, row in pairs:
        own.copy_(row)
