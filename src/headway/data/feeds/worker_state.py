"""Workers' random streams, carried along with their batches, so that a pass resumes with the numbers torch would give.

One process alone reads with torch's own seeding: worker i begins at the loader's base seed + i, and what a sample draws
depends on all that its worker has drawn before. Each batch therefore brings the state that its worker's streams had
after it, where they have moved (17 kB, 0.1 ms in the worker). A pass that is resumed after n batches sends the last
states along with the first indices: batch k comes from worker k mod W, so the new worker j goes on where the worker of
batch n + j was.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from headway.data.feeds.feed import State
from headway.data.sampling.rng import read_text, write_text


class WorkerBatch(NamedTuple):
    """A batch on its way from a worker.

    Attributes:
        batch: as the user's collate function made it.
        streams: of the worker after it; None: as after its last one.
    """

    batch: Any
    streams: str | None


class WorkerStateCollate:
    """The user's collate function in a worker, with the worker's random streams beside what it returns."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._last: str | None = None

    def __call__(self, samples: object) -> WorkerBatch:
        """Collate, then look at the streams."""
        batch = self.collate_fn(samples)
        streams = read_text()
        moved = None if streams == self._last else streams
        self._last = streams
        return WorkerBatch(batch, moved)


class ResumedIndices:
    """Indices on their way to a worker whose streams are to go on from somewhere; they arrive as they were.

    Args:
        index: whatever the dataset is asked for.
        streams: as `read_text` read them.
    """

    def __init__(self, index: Any, streams: str) -> None:
        self.index = index
        self.streams = streams

    def __reduce__(self) -> tuple[object, ...]:
        return _arrive, (self.index, self.streams)


class WorkerRNGStates:
    """Where the streams of a pass's workers are, as of the batch last yielded.

    Workers go by the numbers that they would have in a pass that was never interrupted.

    Args:
        num_workers: 1 or more.
        is_persistent: they live on after a pass, and draw on.
    """

    def __init__(self, num_workers: int, is_persistent: bool) -> None:
        self._is_persistent = is_persistent
        self._streams: list[str | None] = [None] * num_workers
        self._num_batches = 0
        self._are_sent = False
        self._loaded: tuple[list[str | None], int] | None = None

    def begin(self, is_seeking: bool) -> int:
        """A pass begins; with `is_seeking` where the loaded streams were.

        Returns:
            Batches to read again before it: where not every worker had one, it is begun at its start.
        """
        loaded, self._loaded = self._loaded, None
        self._num_batches = 0
        if not self._is_persistent:
            self._are_sent, self._streams = False, [None] * len(self._streams)
        if loaded is None or not (is_seeking or self._is_persistent):
            return 0
        streams, num_batches = loaded
        if is_seeking and None in streams:
            return num_batches
        self._streams, self._are_sent = streams, True
        self._num_batches = num_batches if is_seeking else 0
        return 0

    def to_send(self) -> list[str | None]:
        """For the first batches of the pass, the streams that their workers begin with; None: their own."""
        if not self._are_sent:
            return []
        count = len(self._streams)
        return [self._streams[(self._num_batches + number) % count] for number in range(count)]

    def note(self, carried: WorkerBatch) -> Any:
        """A batch has come; returns it bare."""
        if carried.streams is not None:
            self._streams[self._num_batches % len(self._streams)] = carried.streams
        self._num_batches += 1
        return carried.batch

    def state(self, is_running: bool) -> State:
        """The workers' streams and the batches so far; between two passes only of persistent ones."""
        if not (is_running or self._is_persistent):
            return {}
        return {"workers": {"streams": list(self._streams), "num_batches": self._num_batches}}

    def load_state(self, state: State) -> None:
        """Go on from them, where as many workers read."""
        told = state.get("workers", {"streams": (), "num_batches": 0})
        fits = len(told["streams"]) == len(self._streams)
        self._loaded = (list(told["streams"]), told["num_batches"]) if fits else None


def _arrive(index: object, streams: str) -> Any:
    write_text(streams)
    return index
