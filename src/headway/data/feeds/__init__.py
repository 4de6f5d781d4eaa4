"""Where batches come from (indices, streams, one reader for all, worker processes), and what a prepared loader asks of that."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from headway.data.sampling.shard import RankBatch

Delivery = tuple[Any, RankBatch]
"""A batch as the user's collate function made it, and what is known about it."""

State = dict[str, Any]
"""What a part of a loader leaves in a checkpoint, by name: plain values, lists of them, tensors."""

UNCOUNTABLE = (
    "{what} holds no tensor with a first dimension, so its rows cannot be counted; where several ranks share a loader "
    "with batch_size=None, its items must be batches: tensors of shape [rows, ...]"
)
"""Why an item without rows is refused."""


class BatchFeed(Protocol):
    """Yields the batches of one rank, epoch by epoch.

    Attributes:
        is_even: complete last rounds with repeated samples.
        seed: of the order and of the workers' streams; a resumed run takes up that of the run it resumes.
    """

    is_even: bool
    seed: int

    def open(self) -> None:
        """An iterator is made: draw from the global generators what a plain loader would draw now; `start` follows."""

    def start(self, epoch: int, consumed: int, num_skipped: int) -> tuple[int, Iterator[Delivery]]:
        """Begin a pass.

        Args:
            epoch: its number.
            consumed: begin after so many real samples.
            num_skipped: begin after so many rounds instead, where it is not 0.

        Returns:
            The real samples before the first batch, and the batches.
        """

    def follow(self, epoch: int) -> None:
        """A pass that another process reads begins: draw what it draws."""

    def __len__(self) -> int:
        """Batches of a whole epoch, equal on all ranks; TypeError where the user's data has no length."""

    @property
    def round_size(self) -> int | None:
        """Samples that all ranks together get per step; None where that varies."""

    @property
    def step_size(self) -> int | None:
        """The same by the loader's own settings, where `keep_window` has changed it."""

    def fits_window(self, window: int, num_rounds: int) -> bool:
        """Can `window` samples be given out in `num_rounds` rounds, none of them larger than the loader's own?"""

    def keep_window(self, window: int, num_rounds: int, unit: int) -> None:
        """Give them out so from the next pass on, windows beginning where it begins; a window of 0: as the loader says.

        Args:
            window: samples of one update.
            num_rounds: rounds that they take.
            unit: with drop_last, what an end is dropped by.
        """

    @property
    def inner(self) -> DataLoader[Any]:
        """The torch loader that reads."""

    def state(self, is_running: bool) -> State:
        """What a position alone does not say."""

    def left(self) -> State:
        """What the next pass needs of one that was left."""

    def mark(self) -> State:
        """The same of a pass in progress, cheap, for one that may have to go back here: samples are sought by their number."""

    def load_state(self, state: State) -> None:
        """Let the next pass go on from that."""


def seed_generator(loader: DataLoader[Any], seed: int) -> None:
    """Seed the generator that `loader` takes its workers' base seed from."""
    generator: torch.Generator | None = loader.generator
    if generator is not None:
        generator.manual_seed(seed)
