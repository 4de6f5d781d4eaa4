"""Find the origin of a NaN: rerun the accumulation window that produced it, and check every operation.

A window is run again after a non-finite loss or gradient. The loader returns the window's batches once more. RNG states
and buffers are restored to the beginning of the window. So the loop's own code runs again, but no update is made from
it. Meanwhile `OperationTracer` checks each operation of forward and backward.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import find_batch_size
from headway.core.training.interfaces import NanOrigin, OriginSearch
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow
from headway.extras.operation_tracer import OperationTracer
from headway.extras.replay.snapshot import BatchSnapshot
from headway.log import get_logger

log = get_logger(__name__)

_MAX_BATCHES = 256
"""Largest number of batches of an accumulation window that are kept in memory until its update is judged."""
_TOO_LONG = (
    "this update cannot be replayed to find the origin of its non-finite values, because it has more than %d batches: fewer, larger "
    "micro-batches make it possible"
)


class _RecordedBatch(NamedTuple):
    """Batch of the current accumulation window.

    Attributes:
        loader: Loader that has yielded the batch.
        batch: The batch.
        share: This rank's share of the global batch.
    """

    loader: PreparedLoader
    batch: Any
    share: Any


class WindowReplay(OriginSearch):
    """Recorder of an accumulation window's batches. It runs the window again to find the origin of a NaN.

    Only one window of a run is run again. The loader then repeats its batches, so that the script's own code runs on
    them. If several sets of models train on one batch, the code of all of them runs, but only one window is traced.

    Args:
        run: Run of the Accelerator.

    Attributes:
        is_armed: Whether a window will be run again, as soon as its loader is asked for the next batch.
        is_repeating: Whether the script is processing repeated batches. No update may be made then.
        tracer: Tracer of the window that is being run again, or None.
        is_spent: Whether no further window will be run again: the only replay was used, or it is impossible.
    """

    def __init__(self, run: Run) -> None:
        self._prepared, self._windows, self._rank = run.prepared, run.windows, run.runtime.rank
        self._window_batches: deque[_RecordedBatch] = deque(maxlen=_MAX_BATCHES)
        self._num_fetched: Counter[PreparedLoader] = Counter()  # of the current window, by loader
        self._snapshot = BatchSnapshot(run.prepared, (), run.runtime.hardware, has_counts=False)
        self._loader: PreparedLoader | None = None  # loader and models of the window that is run again
        self._models: tuple[torch.nn.Module, ...] = ()
        self.is_armed = self.is_repeating = self.is_spent = False
        self.tracer: OperationTracer | None = None
        self._seen = run.seen
        self._seen_state: Any = None  # before the window is run again
        run.events.pass_wrappers.append(self._repeat_batches)

    def _repeat_batches(self, loader: PreparedLoader, deliveries: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches, and record them. After `arm_replay`, yield the batches of its window again.

        Args:
            loader: Loader.
            deliveries: Pairs of (batch, this rank's share of the global batch) that the loader yields.
        """
        try:
            for batch, share in deliveries:
                if not self.is_spent:
                    self._record_batch(loader, batch, share)
                yield batch, share
                if self.is_armed and self._loader is loader:
                    self.is_armed, self.is_repeating = False, True
                    yield from self._replay_batches()
                    self._disarm()
        finally:  # also if the loop is left early
            if self._loader is loader:
                self._disarm()

    def _record_batch(self, loader: PreparedLoader, batch: Any, share: Any) -> None:
        """Record a batch. If no window is unfinished, it begins a new one: save the state, and drop earlier batches.

        Args:
            loader: Loader that has yielded the batch.
            batch: Batch.
            share: This rank's share of the global batch.
        """
        windows = self._windows
        if windows.are_closed and not windows.is_unfinished and not windows.reads.num_unused_reads:
            self._window_batches.clear()
            self._num_fetched.clear()
            self._snapshot.save_state()
            self._snapshot.restore_gradients()  # `save_state` has moved them into the snapshot
        self._window_batches.append(_RecordedBatch(loader, batch, share))
        self._num_fetched[loader] += 1

    def _list_batches(self, loader: PreparedLoader) -> list[_RecordedBatch]:
        return [each for each in self._window_batches if each.loader is loader]

    def _replay_batches(self) -> Iterator[Any]:
        """Restore the state from the beginning of the window, and yield its batches while operations are traced.

        The batches count no samples, because their samples were counted before.
        """
        assert self._loader is not None
        batches = self._list_batches(self._loader)
        self._window_batches.clear()
        self._seen_state = self._seen.snapshot()
        self._snapshot.restore()
        self.tracer = OperationTracer(self._prepared, self._rank)
        self.tracer.__enter__()
        for _, batch, share in batches:
            if self.tracer is not None:
                self.tracer.num_rows = share.num_rows or find_batch_size(batch) or 0
                yield batch, share._replace(num_samples=0)

    def _disarm(self) -> None:
        """End the replay, if it has not ended yet, and let the loader continue."""
        self.end_replay()
        if self.is_repeating:
            self._seen.restore(self._seen_state)  # the script has counted the tokens of the repeated batches again
        self.is_armed, self.is_repeating, self._loader = False, False, None

    def arm_replay(self, window: AccumulationWindow) -> bool:
        """Prepare to run an accumulation window again, after its update was refused because of a non-finite value.

        The loader then returns the window's batches once more.

        Returns:
            Whether a window will be run again: this one, or one that was refused before it on the same batches. False
                if a window was run again before, if the batches did not come from a prepared loader, or if there were
                more than 256 of them.
        """
        if self.is_armed:
            return True
        was_spent, self.is_spent = self.is_spent, True
        loader = self._windows.reads.loader
        batches = [] if loader is None else self._list_batches(loader)
        if was_spent or loader is None or not batches:
            return False
        if len(batches) < self._num_fetched[loader]:
            log.warning(_TOO_LONG, _MAX_BATCHES)
            return False
        self._loader, self._models, self.is_armed = loader, window.models, True
        return True

    def is_tracing(self, window: AccumulationWindow) -> bool:
        """Whether `window` is the one that is being run again and traced."""
        return self.tracer is not None and window.models == self._models

    def end_replay(self) -> NanOrigin | None:
        """Stop checking operations, and restore the state from the beginning of the accumulation window.

        Returns:
            The origin of the non-finite value that was found on this rank, or None. The origin of a bad loss takes
                precedence over that of a bad gradient. Also None, with no effect, if no window is being run again.
        """
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return None
        tracer.__exit__(None, None, None)
        origin = tracer.loss_origin or tracer.find_gradient_origin(self._prepared.list_parameters())
        self._snapshot.restore()
        return origin
