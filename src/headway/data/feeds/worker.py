"""Worker processes: the random numbers they draw, and the signals they leave to their rank.

Each sample's random numbers are seeded by its position in the epoch's order. Nothing wraps the dataset or the user's
worker_init_fn: the indices themselves, once they have travelled to a worker, seed its torch, Python and NumPy streams as the
dataset goes through them. So an augmentation depends on (seed, epoch, position) alone, not on how many workers or ranks there
are, or where a run was resumed. It costs about 10 us a sample. A dataset that fetches a whole batch at once (`__getitems__`)
is seeded once a batch, by the position of its first sample; so is one that is known to draw nothing.

SLURM, systemd and a terminal send a signal to every process of a job. A worker that it ended would take its rank along
before that has saved. So in a run that listens for signals, a worker that one reaches asks whether its rank has heard one too,
and then goes on: the rank saves and ends, and its workers with it. Where the rank has heard nothing the signal was meant for
the worker, as when torch ends one that does not come back; so it is at the second signal.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from headway.runtime.seed import mix


def seed_streams(seed: int) -> None:
    """Seed this worker's torch, Python and NumPy streams."""
    # Not torch.manual_seed, which would seed every device's generator too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class SeededIndices(list[Any]):
    """A batch of indices on its way to a worker; there, going through them seeds the streams for each.

    Args:
        indices: of the batch.
        stream: the seed of the epoch.
        position: the first one's place in the epoch's order.
    """

    def __init__(self, indices: Sequence[Any], stream: int, position: int) -> None:
        super().__init__(indices)
        self.stream = stream
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        # A slice is a plain list: iterating here would seed the parent's streams.
        return _arrive, (self[:], self.stream, self.position)

    def __iter__(self) -> Iterator[Any]:
        for offset in range(len(self)):
            seed_streams(mix(self.stream, self.position + offset))
            yield self[offset]


class Seeded:
    """A single index, or a batch of them, on its way to a worker; it seeds the streams once and arrives as it was.

    Args:
        index: whatever the dataset is asked for.
        stream: the seed of the epoch.
        position: its first sample's place in the epoch's order.
    """

    def __init__(self, index: Any, stream: int, position: int) -> None:
        self.index = index
        self.seed = mix(stream, position)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive_alone, (self.index, self.seed)


def is_read_one_by_one(dataset: object) -> bool:
    """Does torch ask this dataset for each sample of a batch, and might it draw random numbers for each?"""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) in (TensorDataset, list, tuple, range):
        return False
    return not callable(getattr(dataset, "__getitems__", None))


def _arrive(indices: list[Any], stream: int, position: int) -> SeededIndices:
    seed_streams(mix(stream, position))
    return SeededIndices(indices, stream, position)


def _arrive_alone(index: object, seed: int) -> Any:
    seed_streams(seed)
    return index


_HEARD = 2.0
"""Seconds in which the rank says that it has heard the same signal."""


class SignalEvent(Protocol):
    """An event among processes: the rank has heard a signal."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it."""


class WorkerStart:
    """A worker_init_fn that makes the worker leave signals to its rank, then calls the user's.

    Args:
        worker_init_fn: the user's, if any.
        signals: those that ask the run to end.
        heard: set by the rank when one of them has come to it.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, signals: Sequence[int], heard: SignalEvent) -> None:
        self.worker_init_fn = worker_init_fn
        self.signals = signals
        self._heard = heard
        self._seen: set[int] = set()

    def __call__(self, worker_id: int) -> None:
        """In the worker."""
        for number in self.signals:
            signal.signal(number, self._leave_to_rank)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)

    def _leave_to_rank(self, number: int, frame: FrameType | None) -> None:
        is_first = number not in self._seen
        self._seen.add(number)
        if not (is_first and self._heard.wait(_HEARD)):
            os._exit(0)  # as torch's worker does when its rank ends it
