"""Worker processes, and the torch loader that starts them: the random numbers they draw, the signals they leave to their rank.

Each sample's random numbers are seeded by its position in the epoch's order. Nothing wraps the dataset or the user's
worker_init_fn: the indices themselves, once they have travelled to a worker, seed its torch, Python and NumPy generators as the
dataset goes through them. So an augmentation depends on (seed, epoch, position) alone, not on how many workers or ranks there
are, or where a run was resumed. It costs about 10 us a sample. A dataset that fetches a whole batch at once (`__getitems__`)
is seeded once a batch, by the position of its first sample; so is one that is known to draw nothing.

SLURM, systemd and a terminal send a signal to every process of a job. A worker that it ended would take its rank along
before that has saved. So in a run that listens for signals, a worker that one reaches asks whether its rank has heard one too,
and then goes on: the rank saves and ends, and its workers with it. Where the rank has heard nothing the signal was meant for
the worker, as when torch ends one that does not come back; so it is at the second signal.

One process alone reads with torch's own seeding, and carries its workers' generators along with their batches to resume
there: worker i begins at the loader's base seed + i, and what a sample draws depends on all that its worker has drawn
before. Each batch therefore brings the state that its worker's generators had after it, where they have moved (17 kB, 0.1 ms
in the worker). A pass that is resumed after n batches sends the last states along with the first indices: batch k comes
from worker k mod W, so the new worker j goes on where the worker of batch n + j was.
"""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from headway.data.feeds import State
from headway.data.sampling.rng import read_text
from headway.runtime.ending import listened_for, tell
from headway.runtime.seed import mix

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event


def seed_generators(seed: int) -> None:
    """Seed this worker's torch, Python and NumPy generators."""
    # Not torch.manual_seed, which would seed every device's generator too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class SeededIndices(list[Any]):
    """A batch of indices on its way to a worker; there, going through them seeds the generators for each.

    Args:
        indices: of the batch.
        stream: the seed of the epoch.
        position: the first one's place in the epoch's order.
    """

    def __init__(self, indices: Sequence[Any], stream: int, position: int) -> None:
        super().__init__(indices)
        self.stream, self.position = stream, position

    def __reduce__(self) -> tuple[object, ...]:
        # A slice is a plain list: iterating here would seed the parent's generators.
        return _arrive, (self[:], self.stream, self.position)

    def __iter__(self) -> Iterator[Any]:
        for offset in range(len(self)):
            seed_generators(mix(self.stream, self.position + offset))
            yield self[offset]


class IndexAfter:
    """A single index, or a batch of them, on its way to a worker; something is called once there, and it arrives as it was.

    Args:
        index: whatever the dataset is asked for.
        act: a function of a module.
        value: what it is called with.
    """

    def __init__(self, index: Any, act: Callable[[Any], None], value: int | str) -> None:
        self._sent = index, act, value

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive_after, self._sent


def is_read_one_by_one(dataset: object) -> bool:
    """Does torch ask this dataset for each sample of a batch, and might it draw random numbers for each?"""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) in (TensorDataset, list, tuple, range):
        return False
    return not callable(getattr(dataset, "__getitems__", None))


def _arrive(indices: list[Any], stream: int, position: int) -> SeededIndices:
    seed_generators(mix(stream, position))
    return SeededIndices(indices, stream, position)


def _arrive_after(index: object, act: Callable[[Any], None], value: int | str) -> Any:
    act(value)
    return index


_HEARD = 2.0
"""Seconds in which the rank says that it has heard the same signal."""


def start_worker(
    worker_init_fn: Callable[[int], Any] | None, signals: Sequence[int], heard: "Event", worker_id: int
) -> None:
    """Make the worker leave signals to its rank, then call the user's own start of a worker.

    Args:
        worker_init_fn: the user's, if any.
        signals: those that ask the run to end.
        heard: set by the rank when one of them has come to it.
        worker_id: as torch counts them.
    """
    seen: set[int] = set()

    def leave_to_rank(number: int, frame: FrameType | None) -> None:
        is_first = number not in seen
        seen.add(number)
        if not (is_first and heard.wait(_HEARD)):
            os._exit(0)  # as torch's worker does when its rank ends it

    for number in signals:
        signal.signal(number, leave_to_rank)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


class WorkerBatch(NamedTuple):
    """A batch on its way from a worker.

    Attributes:
        batch: as the user's collate function made it.
        rng_states: of the worker after it; None: as after its last one.
    """

    batch: Any
    rng_states: str | None


class WorkerStateCollate:
    """The user's collate function in a worker, with the worker's RNG states beside what it returns."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._last: str | None = None

    def __call__(self, samples: object) -> WorkerBatch:
        """Collate, then look at the generators."""
        batch = self.collate_fn(samples)
        rng_states = read_text()
        moved = None if rng_states == self._last else rng_states
        self._last = rng_states
        return WorkerBatch(batch, moved)


class WorkerRNGStates:
    """Where the generators of a pass's workers are, as of the batch last yielded.

    Workers go by the numbers that they would have in a pass that was never interrupted.

    Args:
        num_workers: 1 or more.
        is_persistent: they live on after a pass, and draw on.
    """

    def __init__(self, num_workers: int, is_persistent: bool) -> None:
        self._is_persistent = is_persistent
        self._rng_states: list[str | None] = [None] * num_workers
        self._num_batches = 0
        self._are_sent = False
        self._loaded: tuple[list[str | None], int] | None = None

    def begin(self, is_seeking: bool) -> int:
        """A pass begins; with `is_seeking` where the loaded generators were.

        Returns:
            Batches to read again before it: where not every worker had one, it is begun at its start.
        """
        loaded, self._loaded = self._loaded, None
        self._num_batches = 0
        if not self._is_persistent:
            self._are_sent, self._rng_states = False, [None] * len(self._rng_states)
        if loaded is None or not (is_seeking or self._is_persistent):
            return 0
        rng_states, num_batches = loaded
        if is_seeking and None in rng_states:
            return num_batches
        self._rng_states, self._are_sent = rng_states, True
        self._num_batches = num_batches if is_seeking else 0
        return 0

    def to_send(self) -> list[str | None]:
        """For the first batches of the pass, the generators that their workers begin with; None: their own."""
        if not self._are_sent:
            return []
        count = len(self._rng_states)
        return [self._rng_states[(self._num_batches + number) % count] for number in range(count)]

    def note(self, carried: WorkerBatch) -> Any:
        """A batch has come; returns it bare."""
        if carried.rng_states is not None:
            self._rng_states[self._num_batches % len(self._rng_states)] = carried.rng_states
        self._num_batches += 1
        return carried.batch

    def state(self, is_running: bool) -> State:
        """The workers' generators and the batches so far; between two passes only of persistent ones."""
        if not (is_running or self._is_persistent):
            return {}
        return {"workers": {"streams": list(self._rng_states), "num_batches": self._num_batches}}

    def load_state(self, state: State) -> None:
        """Go on from them, where as many workers read."""
        told = state.get("workers", {"streams": (), "num_batches": 0})
        fits = len(told["streams"]) == len(self._rng_states)
        self._loaded = (list(told["streams"]), told["num_batches"]) if fits else None


_SETTINGS = [
    "collate_fn", "num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "persistent_workers", "in_order",
]  # fmt: skip


def rebuild(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """A loader with all of `loader`'s settings but its source of indices, and with `changes`.

    It draws its workers' base seed from a generator of its own, so that iterating leaves torch's global generator alone;
    seed `generator` before each pass. Where this process listens for signals, the workers leave them to it.

    Args:
        loader: the user's.
        kind: the class to make.
        changes: arguments of that class: the source of indices, and what else differs.
    """
    # Settings differ between torch's versions; what this one has, it accepts.
    names = _SETTINGS + (["multiprocessing_context", "prefetch_factor"] if loader.num_workers > 0 else [])
    names += ["snapshot_every_n_steps"] if hasattr(kind, "state_dict") else []
    settings = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.num_workers > 0 and (signals := listened_for()):
        context = loader.multiprocessing_context or multiprocessing
        heard = context.Event()
        tell(heard.set)
        settings["worker_init_fn"] = partial(start_worker, settings["worker_init_fn"], signals, heard)
    return kind(**{"dataset": loader.dataset, "generator": torch.Generator(), **settings, **changes})
