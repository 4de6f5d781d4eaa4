"""`BatchFeed`, the interface through which a loader reads the batches of one rank, and the types that it uses.

In one step, every rank gets one batch. The last step may be incomplete. It is then dropped, or completed with padding.
Padding consists of repeated samples that are not counted as consumed. Ranks that read the same data shard, such as those
of a tensor-parallel group, count as one rank in this package.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from headway.core.data.sampling.shard import RankBatch

Delivery = tuple[Any, RankBatch]
"""Pair of the batch that the user's collate function returned, and its `RankBatch` with row counts."""

State = dict[str, Any]
"""State dict of one part of a loader, as saved in a checkpoint.

Its values are plain values, lists of plain values, or tensors.
"""

UNCOUNTABLE = (
    "{what} contains no tensor with a first dimension, so its rows cannot be counted; where several ranks share a loader with "
    "batch_size=None, its items must be batches: tensors of shape [rows, ...]"
)
"""Template of the error message for an item whose rows cannot be counted."""


class BatchFeed(Protocol):
    """Interface for reading the batches of one rank, epoch by epoch.

    Attributes:
        even_batches: Whether to complete the last step with repeated samples, so that every rank gets a full batch.
        seed: Seed of the sample order and of the workers' random numbers. A resumed run uses the seed of the original
            run.
    """

    even_batches: bool
    seed: int

    def draw_iter_seeds(self) -> None:
        """Draw the seeds that torch's DataLoader draws in `iter()`. Call it before `start_pass`."""

    def start_pass(self, epoch: int, num_consumed: int, num_skipped_steps: int) -> tuple[int, Iterator[Delivery]]:
        """Start a pass over an epoch.

        Args:
            epoch: Number of the epoch.
            num_consumed: Number of non-padding samples after which to start.
            num_skipped_steps: If not 0, number of batches per rank after which to start. `num_consumed` is then
                ignored.

        Returns:
            Pair of (number of non-padding samples before the first batch, iterator over pairs of (batch, `RankBatch`)).
        """

    def set_dataset_state_saving(self, is_saved: bool) -> None:
        """Set whether saved positions include the dataset's own `state_dict()`, from the next pass on.

        It has no effect on a map-style dataset.

        Args:
            is_saved: Whether to include the dataset's state.
        """

    def draw_for_remote_pass(self, epoch: int) -> None:
        """Draw the random numbers of a pass that another process reads for this rank. Nothing is read.

        The loader's own draws then leave equal RNG states on all ranks. Call this method instead of `start_pass`, after
        `draw_iter_seeds`.

        Args:
            epoch: Number of the epoch.
        """

    def __len__(self) -> int:
        """Return the number of batches per rank in a complete epoch, equal on all ranks.

        Raises:
            TypeError: If the user's data has no length.
        """

    @property
    def samples_per_step(self) -> int | None:
        """Number of samples that all ranks together get per step; None if it varies."""

    @property
    def configured_samples_per_step(self) -> int | None:
        """Number of samples per step over all ranks, as configured in the user's DataLoader. None if it varies.

        Unlike `samples_per_step`, it ignores `set_update_size`.
        """

    def can_fit_update(self, samples_per_update: int, num_steps: int) -> bool:
        """Whether `num_steps` batches per rank can hold `samples_per_update` samples per update.

        Batches may be smaller than the configured batch size, but not larger.

        Args:
            samples_per_update: Number of samples per gradient update over all ranks.
            num_steps: Number of batches per rank and update.
        """

    def set_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int) -> None:
        """Use `samples_per_update` samples per gradient update from the next pass on.

        Updates are counted from the position at which that pass starts.

        Args:
            samples_per_update: Number of samples per update over all ranks; 0 to return to the user's settings.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples.
        """

    @property
    def inner_loader(self) -> DataLoader[Any]:
        """DataLoader that reads the dataset, created with the settings of the user's loader.

        Its sampler and its collate function can be Headway's own.
        """

    def state(self, is_running: bool) -> State:
        """Return the state that a checkpoint needs in addition to the position, such as RNG states.

        Args:
            is_running: Whether a pass is in progress.
        """

    def state_after_break(self) -> State:
        """Return the state to save for the next pass, after the current one was left early (by `break`).

        The state has no position, because the next pass starts at the beginning of an epoch. It is empty if the next
        pass needs no saved state.
        """

    def position_state(self) -> State:
        """Return a small state of the current pass, from which a run can resume at the current batch.

        It leaves out states that are valid only for the latest batch, such as the state of a StatefulDataLoader.
        """

    def load_state(self, state: State) -> None:
        """Load a state that `state`, `position_state` or `state_after_break` returned. The next pass starts from it.

        An empty state discards the state that was loaded before.
        """

    def set_loader_option(self, name: str, value: Any) -> None:
        """Change a setting of the DataLoader that reads the dataset, from the next pass on.

        Args:
            name: "collate_fn", "worker_init_fn", "timeout", "pin_memory" or "prefetch_factor".
            value: New value. The user's loader already has it.
        """
