"""The `state_dict()` of an iterable dataset itself, and how saved positions include it."""

import copy
from typing import Any

import numpy
import torch

from headway.core.data.feeds.shuffle_buffers import has_shuffle_buffer
from headway.errors import DataError


class DatasetStateRecord:
    """Record of an iterable dataset's `state_dict()` after each step of a pass.

    It is needed if the script registers the dataset for checkpointing. Loading a checkpoint then restores the dataset
    at a position after the consumed samples. Without the dataset's state, the loader would skip these samples a second
    time.

    Args:
        dataset: User's dataset.

    Attributes:
        is_active: Whether states are recorded in the current pass.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_requested = False
        self.is_active = False
        self._state: Any = None  # state of the dataset after the latest step
        self._has_position = False  # whether the state changes from step to step

    def set_requested(self, is_requested: bool) -> None:
        """Set whether to record the states, from the next pass on.

        Raises:
            DataError: If `is_requested` is True and the dataset shuffles with a buffer. The dataset's state lacks the
                samples in the buffer.
        """
        if is_requested and has_shuffle_buffer(self._dataset):
            raise DataError(
                "the registered stream is shuffled by a buffer, and datasets saves its state without the samples in the buffer, so a "
                "resumed run would lose them. Leave out register_for_checkpointing(dataset): the loader finds its position by "
                "reading the stream again. headway.ShardedDataset shuffles files by a buffer that can be resumed without reading"
            )
        self._is_requested = is_requested

    def start_pass(self, is_possible: bool, loaded_state: Any) -> bool:
        """Start a pass: load the saved state of an interrupted pass, or else record the dataset's state at the start.

        Args:
            is_possible: Whether this process reads all samples of the dataset itself, so that its state is known after
                each step.
            loaded_state: Saved state of the dataset; None if the pass does not resume from one.

        Returns:
            Whether the dataset now has the saved state, so that it continues after the consumed samples.
        """
        self.is_active = self._is_requested and is_possible
        self._has_position = False
        self._state = None
        if not self.is_active:
            return False
        if loaded_state is None:
            self._state = self.read_state()
            return False
        self._dataset.load_state_dict(copy.deepcopy(loaded_state))
        self._state = loaded_state
        self._has_position = True
        return True

    def read_state(self) -> Any:
        """Return a copy of the dataset's present state."""
        return copy.deepcopy(self._dataset.state_dict())

    def record_step(self, state: Any) -> None:
        """Record the dataset's state after a step, and whether it changes from step to step.

        Args:
            state: Result of `read_state` directly after the samples of the step were read.
        """
        self._has_position = self._has_position or not has_equal_values(state, self._state)
        self._state = state

    def describe_position(self) -> dict[str, Any]:
        """Return {"dataset": state after the latest step}; empty if no state contains the position.

        A state that is unchanged after the first step contains no position.
        """
        return {"dataset": self._state} if self._has_position else {}


def has_equal_values(one: Any, other: Any) -> bool:
    """Whether two state dicts contain equal values. Tensors and NumPy arrays are compared by value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(has_equal_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(has_equal_values, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray):
        return numpy.array_equal(one, other)
    return bool(one == other)


def has_dataset_state(inner_loader: Any) -> bool:
    """Whether a state dict of torchdata's StatefulDataLoader contains the state of a dataset or of its iterator."""
    if not isinstance(inner_loader, dict):
        return False
    snapshot = inner_loader.get("_snapshot")
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, dict) else None
    # Without workers, the state of the single reader is in the loader's state itself.
    reader_states = list(workers.values()) if isinstance(workers, dict) else [inner_loader]
    for state in reader_states:
        fetcher = state.get("fetcher_state") or {}
        if state.get("dataset_state") is not None or fetcher.get("dataset_iter_state") is not None:
            return True
    return False
