"""Worker processes of a loader: their random numbers, their signal handling, and the DataLoader that starts them.

`WorkerSeeding` lists the ways in which workers get their random numbers.

BY_POSITION: in a run with several ranks, each sample's random numbers are seeded by its position in the epoch. Neither
the dataset nor the user's worker_init_fn is wrapped. Instead, the indices are sent to a worker as a list that seeds its
torch, Python and NumPy generators during iteration (`SeededIndices`). So an augmentation depends only on (seed, epoch,
position). It does not depend on the number of workers or ranks, or on where a run was resumed. This costs about 10 us
per sample. A dataset that fetches a whole batch at once (`__getitems__`) is seeded once per batch, by the position of
its first sample. So are datasets of types that draw no random numbers, such as TensorDataset.

RECORDED: a run with a single process keeps torch's own seeding and records its workers' RNG states (`WorkerRNGStates`).
Worker i starts with the seed base_seed + i, and a sample's random numbers depend on everything that its worker has drawn
before. So a worker sends its RNG states along with each batch, if they have changed (17 kB, 0.1 ms in the worker). A
pass that is resumed after n batches sends the latest states to the workers, together with the first indices. Batch k
comes from worker k mod W, where W is the number of workers. So the new worker j gets the states of worker (n + j) mod W.

SLURM, systemd and a terminal send a signal to every process of a job. If the signal ended a worker, its rank would
fail before it has saved. So if the run handles signals, a worker that receives a signal checks whether its rank has
received it too. If so, the worker continues. The rank then saves and exits, and ends its workers. If not, the signal
was meant for the worker, for example because torch terminates a worker that hangs. A second signal always ends the
worker.
"""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from headway.core.data.feeds.protocol import State
from headway.core.data.sampling.rng import encode_global_states
from headway.core.runtime.seed import mix_seed
from headway.core.runtime.signals import add_listener, list_handled_signals

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

_SIGNAL_TIMEOUT = 2.0
"""Seconds that a worker that has received a signal waits for its rank to report that it has received one too."""
_COPIED_SETTINGS = [
    "collate_fn", "num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "persistent_workers", "in_order",
]  # fmt: skip


class WorkerSeeding(Enum):
    """Method by which the workers of a map-style loader get their random numbers."""

    BY_POSITION = "by position"
    """Each sample, or each batch that is fetched at once, is seeded by its position in the epoch."""
    RECORDED = "recorded"
    """torch seeds each worker once, and a saved state contains the workers' RNG states. Only for a single process."""
    TORCH = "torch"
    """torch seeds each worker once. In a resumed epoch, workers draw other random numbers than without the interruption."""


def seed_generators(seed: int) -> None:
    """Seed the global torch (CPU), Python and NumPy generators of the calling process, which is a worker."""
    # Do not use torch.manual_seed, which would seed the generators of all devices too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class SeededIndices(list[Any]):
    """List of indices that seeds the worker's random generators for each index while the worker iterates over it.

    Args:
        indices: Sample indices of a batch.
        epoch_seed: Seed of the workers' generators in the epoch.
        position: Position of the first index in the epoch's order.
    """

    def __init__(self, indices: Sequence[Any], epoch_seed: int, position: int) -> None:
        super().__init__(indices)
        self.epoch_seed = epoch_seed
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        # A slice is a plain list. Iterating over self would seed the parent's generators.
        return _unpickle_indices, (self[:], self.epoch_seed, self.position)

    def __iter__(self) -> Iterator[Any]:
        for offset in range(len(self)):
            seed_generators(mix_seed(self.epoch_seed, self.position + offset))
            yield self[offset]


class IndexWithCall:
    """Index, or batch of indices, that calls a function when it is unpickled in a worker.

    The dataset gets the index itself.

    Args:
        index: Index that the dataset receives, or batch of indices.
        function: Function to call. It must be a module-level function, so that it can be pickled.
        argument: Argument of the function.
    """

    def __init__(self, index: Any, function: Callable[[Any], None], argument: int | str) -> None:
        self._index = index
        self._function = function
        self._argument = argument

    def __reduce__(self) -> tuple[object, ...]:
        return _call_and_return_index, (self._index, self._function, self._argument)


def is_read_one_by_one(dataset: object) -> bool:
    """Whether torch fetches each sample of a batch separately, and the dataset may draw random numbers.

    False for a dataset that fetches a batch at once (`__getitems__`), and for types that draw no random numbers, such
    as a list or a TensorDataset. A `Subset` counts as the dataset inside it.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) in (TensorDataset, list, tuple, range):
        return False
    return not callable(getattr(dataset, "__getitems__", None))


def _unpickle_indices(indices: list[Any], epoch_seed: int, position: int) -> SeededIndices:
    """Return the indices of a batch in a worker process, after seeding its generators for this batch.

    Args:
        indices: Indices of the samples.
        epoch_seed: Seed of the epoch.
        position: Position of the batch in the epoch.
    """
    # A dataset that fetches the whole batch at once may use the list without iterating over it.
    seed_generators(mix_seed(epoch_seed, position))
    return SeededIndices(indices, epoch_seed, position)


def _call_and_return_index(index: object, function: Callable[[Any], None], argument: int | str) -> Any:
    """Call a function in a worker process when it unpickles an index, and return the index."""
    function(argument)
    return index


def start_worker(
    worker_init_fn: Callable[[int], Any] | None, signals: Sequence[int], rank_got_signal: "Event", worker_id: int
) -> None:
    """Install the worker's signal handlers, then call the user's worker_init_fn.

    The first signal of each kind is ignored if the rank reports within 2 s that it has received a signal too, because
    the rank then ends its workers. Any other signal of `signals` ends the worker, with exit code 0. A signal that has
    arrived since `iterate_loader` created the process is handled now.

    Args:
        worker_init_fn: User's function; None to call nothing.
        signals: Numbers of the signals that request the end of the run.
        rank_got_signal: Event that the rank sets when it has received one of these signals.
        worker_id: Index of the worker, from 0.
    """
    handled: set[int] = set()

    def exit_unless_rank_got_signal(number: int, frame: FrameType | None) -> None:
        is_first = number not in handled
        handled.add(number)
        if not (is_first and rank_got_signal.wait(_SIGNAL_TIMEOUT)):
            os._exit(0)  # as torch's worker does when its rank terminates it

    for number in signals:
        signal.signal(number, exit_unless_rank_got_signal)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # blocked by `iterate_loader`
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


class WorkerBatch(NamedTuple):
    """Batch sent by a worker.

    Attributes:
        batch: Return value of the script's collate function.
        rng_states: RNG states of the worker after the batch, in the format of `encode_global_states`; None if unchanged
            since its previous batch.
    """

    batch: Any
    rng_states: str | None


class WorkerStateCollate:
    """Collate function that returns the user's batch together with the worker's RNG states.

    Args:
        collate_fn: User's collate function.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._last_states: str | None = None

    def __call__(self, samples: object) -> WorkerBatch:
        """Collate the samples, and return the batch with the worker's RNG states after the collation."""
        batch = self.collate_fn(samples)
        rng_states = encode_global_states()
        changed_states = None if rng_states == self._last_states else rng_states
        self._last_states = rng_states
        return WorkerBatch(batch, changed_states)


class WorkerRNGStates:
    """RNG states of all workers of a loader, as of the latest batch that was delivered.

    With these states, the workers of a resumed run draw the same random numbers as without the interruption.

    Args:
        num_workers: Number of workers, 1 or more.
        is_persistent: Whether workers and their generators outlive a pass.
    """

    def __init__(self, num_workers: int, is_persistent: bool) -> None:
        self._is_persistent = is_persistent
        self._rng_states: list[str | None] = [None] * num_workers
        self._num_batches = 0  # batches read in the pass, including those before a resume
        self._sends_initial_states = False
        self._loaded: tuple[list[str | None], int] | None = None  # states of the workers and number of batches

    def start_pass(self, is_resumed: bool) -> int:
        """Start a pass, and choose the RNG states that the workers get at its start.

        Args:
            is_resumed: Whether the pass resumes in the middle of an epoch.

        Returns:
            Number of batches to read again and discard. It is 0, unless the pass is a resumed one whose state was saved
                before every worker had delivered a batch. In that case, it is the number of batches delivered before
                the save.
        """
        loaded, self._loaded = self._loaded, None
        self._num_batches = 0
        if not self._is_persistent:
            self._sends_initial_states = False
            self._rng_states = [None] * len(self._rng_states)
        if loaded is None or not (is_resumed or self._is_persistent):
            return 0
        rng_states, num_batches = loaded
        if is_resumed and None in rng_states:
            return num_batches
        self._rng_states = rng_states
        self._sends_initial_states = True
        self._num_batches = num_batches if is_resumed else 0
        return 0

    def list_initial_states(self) -> list[str | None]:
        """Return the RNG states to send to the workers with the first indices of a pass, indexed by worker.

        An element is None for a worker that keeps its own states. The list is empty if no states have to be sent.
        States are sent in a resumed pass and, to persistent workers, also in each later pass.
        """
        if not self._sends_initial_states:
            return []
        # Batch k comes from worker k mod num_workers, but a new worker 0 always delivers the first batch after a resume.
        num_workers = len(self._rng_states)
        return [self._rng_states[(self._num_batches + worker) % num_workers] for worker in range(num_workers)]

    def record_batch(self, worker_batch: WorkerBatch) -> Any:
        """Record the RNG states that were sent with a batch, and return the user's batch.

        Call it for the batches of a pass in order, because their position shows from which worker they come.
        """
        if worker_batch.rng_states is not None:
            self._rng_states[self._num_batches % len(self._rng_states)] = worker_batch.rng_states
        self._num_batches += 1
        return worker_batch.batch

    def state(self, is_running: bool) -> State:
        """Return {"workers": {"streams": RNG states by worker, "num_batches": number of batches read in the pass}}.

        The states are text, or None for a worker that has not delivered a batch. The result is empty between passes if
        workers are not persistent.

        Args:
            is_running: Whether a pass is in progress.
        """
        if not (is_running or self._is_persistent):
            return {}
        return {"workers": {"streams": list(self._rng_states), "num_batches": self._num_batches}}

    def load_state(self, state: State) -> None:
        """Load the workers' RNG states that `state` returned, for the next pass.

        They are ignored if the number of workers has changed.

        Args:
            state: State returned by `state`. If it has no "workers", earlier loaded states are discarded.
        """
        workers = state.get("workers", {"streams": (), "num_batches": 0})
        is_same_count = len(workers["streams"]) == len(self._rng_states)
        self._loaded = (list(workers["streams"]), workers["num_batches"]) if is_same_count else None


def rebuild_loader(
    loader: DataLoader[Any], loader_class: type[DataLoader[Any]] = DataLoader, **changes: Any
) -> DataLoader[Any]:
    """Return a new loader with the settings of `loader`, except for `changes`.

    The new loader draws its workers' base seed from its own generator, so that iterating does not advance torch's
    global generator. Its `generator` must be seeded before each pass. If this process handles termination signals, its
    workers ignore a signal that this process has received too, and wait for this process to end them.

    Args:
        loader: User's loader.
        loader_class: Class of the new loader. Default: torch's DataLoader.
        changes: Keyword arguments of the new loader's class that replace the user's settings, such as the sampler.
    """
    # Settings differ between versions of torch; copy those that this version has.
    names = _COPIED_SETTINGS + (["multiprocessing_context", "prefetch_factor"] if loader.num_workers > 0 else [])
    if hasattr(loader_class, "state_dict"):  # torchdata's StatefulDataLoader
        names += ["snapshot_every_n_steps"]
    settings = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    settings["worker_init_fn"] = _wrap_init_fn(loader, settings["worker_init_fn"])
    return loader_class(**{"dataset": loader.dataset, "generator": torch.Generator(), **settings, **changes})


def iterate_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over a loader that `rebuild_loader` created, which starts its workers.

    A new process has the default action for a signal, which is to end, until `start_worker` runs in it. With the
    "spawn" method, this takes seconds. Signals that this process handles are therefore blocked in the new processes,
    and `start_worker` unblocks them.

    Args:
        loader: Loader to iterate over.
    """
    init_fn = loader.worker_init_fn
    if not (isinstance(init_fn, partial) and init_fn.func is start_worker and hasattr(signal, "pthread_sigmask")):
        return iter(loader)
    signals = init_fn.args[1]
    # A new process inherits the mask of the thread that starts it. Other threads still take signals meanwhile.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def set_loader_attribute(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set an attribute of a loader that `rebuild_loader` created.

    A new worker_init_fn is wrapped, so that workers still leave the signals that this process handles to it.

    Args:
        loader: Loader to change.
        name: Name of the attribute.
        value: New value.
    """
    setattr(loader, name, _wrap_init_fn(loader, value) if name == "worker_init_fn" else value)


def _wrap_init_fn(loader: DataLoader[Any], worker_init_fn: Any) -> Any:
    """Return a worker_init_fn that makes workers ignore signals that this process handles and has received too.

    It then calls `worker_init_fn`. If the loader has no workers or this process handles no signals, return
    `worker_init_fn` itself.
    """
    signals = list_handled_signals() if loader.num_workers > 0 else ()
    if not signals:
        return worker_init_fn
    context = loader.multiprocessing_context or multiprocessing
    rank_got_signal = context.Event()
    add_listener(rank_got_signal.set)
    return partial(start_worker, worker_init_fn, signals, rank_got_signal)
