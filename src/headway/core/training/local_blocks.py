"""Interface and registry of local SGD blocks, which checkpoints need in order to save and resume inside such a block.

In a local SGD block, ranks train without gradient reduction. `headway.extras.local_sgd` implements the block.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.gathered_tensors import iterate_buckets
from headway.core.training.windows import AccumulationWindows

_BUCKET_BYTES = 256 << 20
"""Bytes of parameters that are averaged at once. Averaging needs this much memory in addition to the model."""


class LocalBlock(Protocol):
    """Interface of a local SGD block: a `with` block in which ranks train without gradient reduction.

    Attributes:
        model: Prepared model.
        num_steps: Number of optimizer steps made in the block.
    """

    model: torch.nn.Module
    num_steps: int


class _InterruptedBlock(NamedTuple):
    """Local SGD block in which the checkpoint was saved from which the run resumes.

    Attributes:
        num_windows: Number of accumulation windows begun when the checkpoint was loaded. The block is continued only if
            no window has begun since.
        num_steps: Number of optimizer steps made in the block.
        restore_values: Function that restores this rank's own values in the model.
    """

    num_windows: int
    num_steps: int
    restore_values: Callable[[], None]


class LocalTraining:
    """Registry of the local SGD blocks of a run.

    Args:
        windows: Accumulation windows of the run.

    Attributes:
        blocks: Active local SGD block of each model.
        diverged: Models that have been in a local SGD block. Their optimizer states differ between ranks from then on.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self.blocks: dict[torch.nn.Module, LocalBlock] = {}
        self.diverged: WeakSet[torch.nn.Module] = WeakSet()
        self._windows = windows
        self._interrupted_blocks: WeakKeyDictionary[torch.nn.Module, _InterruptedBlock] = WeakKeyDictionary()

    @property
    def num_windows(self) -> int:
        """Number of accumulation windows begun so far, equal on all ranks."""
        return self._windows.num_windows

    def record_interruption(self, model: torch.nn.Module, num_steps: int, restore_values: Callable[[], None]) -> None:
        """Record that the checkpoint from which the run resumes was saved inside a local SGD block.

        The model's next block continues the saved one, unless an accumulation window begins before the block.

        Args:
            model: Prepared model, whose parameters are now the mean over all ranks.
            num_steps: Number of optimizer steps made in the saved block.
            restore_values: Function that restores this rank's own values in the model.
        """
        self._interrupted_blocks[model] = _InterruptedBlock(self.num_windows, num_steps, restore_values)

    def begin_block(self, block: LocalBlock) -> int:
        """Register a local SGD block as active.

        If it continues a block in which a checkpoint was saved, restore this rank's own values in the model.

        Returns:
            Number of optimizer steps made in the block before the run was resumed. 0 if it continues no saved block.
        """
        self.blocks[block.model] = block
        self.diverged.add(block.model)
        interrupted = self._interrupted_blocks.pop(block.model, None)
        if interrupted is None or interrupted.num_windows != self.num_windows:
            return 0
        interrupted.restore_values()
        return interrupted.num_steps

    def end_block(self, block: LocalBlock) -> None:
        """Remove a local SGD block from the active ones."""
        del self.blocks[block.model]


def iterate_averages(values: Iterable[torch.Tensor], collectives: Collectives) -> Iterator[torch.Tensor]:
    """Yield each tensor's mean over the ranks, in the given order. All ranks must iterate over it."""
    for bucket in iterate_buckets(((each, each.nbytes) for each in values), _BUCKET_BYTES):
        yield from collectives.reduce([each.detach() for each in bucket], "mean")
