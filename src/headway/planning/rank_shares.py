"""Compute the memory of every rank of a layout, and the size of a checkpoint, from the shards of one rank's tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from headway.core.config.mesh import Layout
from headway.planning.dry_run.states import StateBytes
from headway.planning.dry_run.tensor_sharding import RankCoordinates, TensorSharding


@dataclass(frozen=True)
class RankShare:
    """Memory of one rank that does not depend on the batch, in bytes.

    Attributes:
        rank: Number of the rank.
        weights: Parameters with their padding, and buffers.
        gradients: Gradients with their padding.
        optimizer_state: Optimizer state of the elements on this rank.
        padding: Padding that is included in `weights`.
    """

    rank: int
    weights: int
    gradients: int
    optimizer_state: int
    padding: int

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class CheckpointSize:
    """Size of a checkpoint of the model and the optimizer.

    Attributes:
        num_files: Number of files, one for each rank that writes data.
        num_bytes: Bytes of all files.
        per_rank: Maximum number of bytes that one rank writes. Ranks that have the same data write equal parts of it.
    """

    num_files: int
    num_bytes: int
    per_rank: int


class ParameterPresence(NamedTuple):
    """Number of ranks that have elements of a parameter.

    Attributes:
        num_ranks: Number of these ranks. The first field, so that the minimum of several is the one on the fewest ranks.
        name: Name of the parameter.
    """

    num_ranks: int
    name: str


class RankShares:
    """Memory of every rank of a layout.

    Args:
        layout: Layout of the run.
        parameters: Parameters of the model, and how they are sharded.
        states: Optimizer state of each parameter, in the order of `parameters`. Empty without an optimizer.
        buffers: Bytes of buffers at each pipeline stage.
        at_peak: Additional bytes that each pipeline stage needs at its peak, such as activations. They are not part of
            any rank's `RankShare`, and only serve to determine which rank needs the most memory. Empty: none.

    Attributes:
        num_empty: Number of ranks that have no element of any parameter.
        num_with_gaps: Number of parameters that have no element on at least one rank. Parameters that only some
            pipeline stages have are not counted.
        rarest: Of the parameters that `num_with_gaps` counts, the one on the fewest ranks. None if there are none.
        saved: Size of a checkpoint, which contains each element once.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[TensorSharding],
        states: Iterable[StateBytes],
        buffers: Sequence[int],
        at_peak: Sequence[int] = (),
    ) -> None:
        self._layout = layout
        self._ranks = RankCoordinates(layout)
        zero = torch.zeros(layout.num_ranks, dtype=torch.long)
        self._at_peak = self._ranks.expand_by_stage(at_peak) if at_peak else zero
        self._weights = self._ranks.expand_by_stage(buffers)
        self._gradients = zero.clone()
        self._state = zero.clone()
        self._padding = zero.clone()
        is_nonempty, written_bytes = zero.bool(), zero.double()  # by rank
        with_gaps: list[ParameterPresence] = []
        for parameter, state in zip(parameters, list(states) or [StateBytes(0, 0)] * len(parameters)):
            num_elements, num_allocated = self._ranks.count_elements(parameter)
            self._weights += num_allocated * parameter.itemsize
            self._padding += (num_allocated - num_elements) * parameter.itemsize
            if parameter.requires_grad:
                self._gradients += num_allocated * parameter.itemsize
            if state.owner is None:
                has_stage = 1 if parameter.stages is None else self._ranks.mask_stages(parameter.stages)
                self._state += num_elements * state.per_element + state.fixed * has_stage
                saved_per_element = parameter.itemsize + state.checkpoint_bytes_per_element
                written_bytes += self._count_written(parameter, num_elements * saved_per_element)
            else:
                owned_bytes = prod(parameter.shape) * state.per_element + state.fixed
                self._state[state.owner] += owned_bytes
                written_bytes += self._count_written(parameter, num_elements * parameter.itemsize)
                written_bytes[state.owner] += prod(parameter.shape) * state.checkpoint_bytes_per_element + state.fixed
            is_nonempty |= num_elements > 0
            num_ranks = int((num_elements > 0).sum())
            if num_ranks < layout.num_ranks and parameter.stages is None:
                with_gaps.append(ParameterPresence(num_ranks, parameter.name))
        self.num_empty = int((~is_nonempty).sum())
        self.num_with_gaps = len(with_gaps)
        self.rarest = min(with_gaps, default=None)
        self.saved = CheckpointSize(
            num_files=int((written_bytes > 0).sum()),
            num_bytes=round(float(written_bytes.sum())),
            per_rank=round(float(written_bytes.max())),
        )

    def _count_written(self, parameter: TensorSharding, num_bytes: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a parameter that each rank writes to a checkpoint, as a tensor of shape (num_ranks,).

        Args:
            parameter: Description of the parameter.
            num_bytes: Bytes of the parameter, and of its optimizer state if each rank has that of its shard, on each
                rank.
        """
        layout = self._layout
        if parameter.stages is not None and len(parameter.stages) < layout.pp:
            # The first rank that has the parameter, or a shard of it, writes it.
            writes = self._ranks.mask_stages(frozenset((min(parameter.stages),)))
            for axis in layout.sizes.keys() - {"pp", *parameter.axes}:
                writes = writes & (self._ranks.coordinates[axis] == 0)
            return num_bytes * writes
        # Ranks with equal shards write equal parts.
        return num_bytes / prod(size for axis, size in layout.sizes.items() if axis not in parameter.axes)

    def get_share(self, rank: int) -> RankShare:
        """Return the memory of the rank with this number."""
        return RankShare(
            rank=rank,
            weights=int(self._weights[rank]),
            gradients=int(self._gradients[rank]),
            optimizer_state=int(self._state[rank]),
            padding=int(self._padding[rank]),
        )

    def find_fullest(self) -> RankShare:
        """Return the memory of the rank that needs the most, including `at_peak`. Of equal ranks, the first is used."""
        return self.get_share(int((self._weights + self._gradients + self._state + self._at_peak).argmax()))
