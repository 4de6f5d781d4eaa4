"""`BatchReads`, the record of which loaders a loop iterates over, which batches it reads, and when it trains on them.

The life of a batch, and the method that records it::

    a pass over a loader begins           `begin_pass`
    the loader yields a batch             the loader adds it to `untrained_batches`
    the loop trains on it                 `record_micro_batch` clears this list, and counts the samples
    the pass ends                         `end_pass` removes the loader's remaining batches

A script can request a batch from one loader while it holds a batch of another. It does so in `zip(one, other)`, or if it
evaluates the model before it trains on the current batch. It can also collect all micro-batches of an update before it
trains on the first. A state saved at such a point would count these batches as trained on, and a resumed run would leave
them out. `forget_dropped_batches` detects this.

A script should read each batch right before it trains on it. `BatchReads` warns if several batches are read before the
first of them is used, because the loader's counts then describe the last one only. It also warns if a checkpoint is
saved between updates on batches that were read together, because the checkpoint counts all of them as trained on.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from headway.log import get_logger

log = get_logger(__name__)

Loader = TypeVar("Loader")
"""Type of the loaders, `PreparedLoader`. This file only compares loaders with each other."""

_READ_AHEAD = (
    "%d batches were read before the first of them was used in accumulate(), so the number of samples and the end of the epoch of "
    "the last one count for all of them. Read each batch right before its block, or give backward(loss, weight=...) and "
    "GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False)"
)

_SAVED_IN_ROUND = (
    "a checkpoint was saved between two updates on batches that were read together (%d batches, as in `for one, other in "
    "zip(...)`). It counts all of them as trained on, so a run that resumes from it leaves out the updates after the save. Save "
    "after the last update of the round, or read each batch right before its update"
)


@dataclass
class _ReadAhead:
    """Counters for the warnings about training loops that read several batches before they use the first of them.

    Batches that are read this way, and the training on them, are called a round. If an update is run again, the counters
    are reset to their values before it.

    Attributes:
        num_unused: Number of batches that the loader had already yielded, but the loop had not used, when it yielded
            the batch of the current micro-batch. A micro-batch for which no batch is read does not change it.
        num_in_round: Number of batches in the latest round.
        was_saved_in_round: Whether a checkpoint was saved during the latest round.
    """

    num_unused: int = 0
    num_in_round: int = 0
    was_saved_in_round: bool = False


class BatchReads(Generic[Loader]):
    """Record of the loaders that a run iterates over, and of the batches that were read and trained on.

    Args:
        find_other_loader: Function that returns another Accelerator's current loader, used if no loader of this run is
            being iterated. By default it returns None.
        active_loaders: List of the loaders that are being iterated, if it is shared with another record. Default: a new
            list.

    Attributes:
        active_loaders: Loaders that are being iterated, innermost last. A loader occurs once per pass in progress.
        untrained_batches: One entry for each batch that was yielded and not trained on yet, in order: the loader that
            yielded the batch.
        untrained_samples: Number of samples, over all ranks, of each entry of `untrained_batches`.
        num_samples_at_end: Number of samples, over all ranks, of the batches that were not trained on yet when the
            latest pass over a loader in `trained_on` ended. The script may have collected them, and still train on
            them. 0 after a micro-batch has begun, and after the start of another pass.
        trained_on: Loaders whose batches were trained on, in order of first use. Of nested loaders, only the innermost.
        read_in_training: All loaders that were being iterated when a micro-batch began, such as both of
            `zip(one, other)`, in order of first use.
        num_samples: Number of samples that the run has trained on since its first update, on all ranks together. When a
            micro-batch begins, all batches that were read since the previous one are counted. No replay undoes this,
            because a replayed batch is not read again.
    """

    def __init__(
        self,
        find_other_loader: Callable[[], Loader | None] = lambda: None,
        active_loaders: list[Loader] | None = None,
    ) -> None:
        self._find_other_loader = find_other_loader
        self.active_loaders: list[Loader] = [] if active_loaders is None else active_loaders
        self.untrained_batches: list[Loader] = []
        self.untrained_samples: list[int] = []
        self.num_samples_at_end = 0
        self.trained_on: list[Loader] = []
        self.read_in_training: list[Loader] = []
        self.num_samples = 0
        self._ahead = _ReadAhead()

    # ---------------------------------------------------------------- passes over loaders

    def begin_pass(self, loader: Loader) -> None:
        """Add a pass over `loader` to `active_loaders`, and set `num_samples_at_end` to 0.

        Batches that an ended pass left untrained are then never counted, because the script is assumed to drop them.
        """
        self.active_loaders.append(loader)
        self.num_samples_at_end = 0

    def forget_dropped_batches(self, loader: Loader, max_collected: int = 1) -> bool:
        """Forget batches that the script has dropped, and return whether all others have been trained on.

        If they have, a state that is saved now leaves out no batch.

        If the script has already collected `max_collected` batches from `loader` and now requests another one, it has
        dropped them. They are then removed from `untrained_batches`, and so are the batches that other loaders yielded
        after the first of them.

        Args:
            loader: Loader whose next batch is requested.
            max_collected: Maximum number of batches that the script may collect from `loader` before it trains on them.
                Default: 1.
        """
        if self.untrained_batches.count(loader) >= max_collected:
            first = self.untrained_batches.index(loader)
            del self.untrained_batches[first:], self.untrained_samples[first:]
        return not self.untrained_batches

    def end_pass(self, loader: Loader, is_left: bool) -> None:
        """Remove the innermost pass over `loader` from `active_loaders`, and all of its batches from `untrained_batches`.

        Several passes over a loader may be in progress at once. `num_samples_at_end` is set to the samples of the
        removed batches if training on them is likely: the loader was trained on before, its batches were read to the
        end, and no other pass is in progress.

        Args:
            loader: Loader whose pass has ended.
            is_left: Whether the script left the pass early, such as by `break`, or an error ended it.
        """
        for index in reversed(range(len(self.active_loaders))):
            if self.active_loaders[index] is loader:
                del self.active_loaders[index]
                break
        if not (is_left or self.active_loaders) and loader in self.trained_on:
            entries = zip(self.untrained_batches, self.untrained_samples)
            self.num_samples_at_end = sum(num_samples for each, num_samples in entries if each is loader)
        kept = [index for index, each in enumerate(self.untrained_batches) if each is not loader]
        self.untrained_batches[:] = [self.untrained_batches[index] for index in kept]
        self.untrained_samples[:] = [self.untrained_samples[index] for index in kept]

    # ---------------------------------------------------------------- training on batches

    def record_micro_batch(self, num_done: int, is_same_window: bool) -> Loader | None:
        """Record that the loop trains on the batch that it has read last.

        Args:
            num_done: Number of micro-batches in the accumulation window so far, with this one.
            is_same_window: Whether the latest micro-batch was in the same window.

        Returns:
            The loader of the batch, or None if it is from no prepared loader.
        """
        active, ahead = self.active_loaders, self._ahead
        # The same as the property `loader`, which would be one more call for each micro-batch.
        loader = active[-1] if active else self._find_other_loader()
        if active and (len(active) > 1 or loader not in self.trained_on):
            self._record_loaders()
        num_reads = 1 if loader is None else self.untrained_batches.count(loader)
        if num_reads:
            ahead.num_unused = num_reads - 1
        elif ahead.num_unused and is_same_window and num_done > 1:
            log.warning_once(_READ_AHEAD, ahead.num_unused + 1)
        if self.untrained_batches:
            ahead.num_in_round = len(self.untrained_batches)
            ahead.was_saved_in_round = False
        elif ahead.was_saved_in_round and num_done == 1:
            log.warning_once(_SAVED_IN_ROUND, ahead.num_in_round)
        if self.untrained_batches or self.num_samples_at_end:
            self._count_untrained()
        return loader

    def record_standalone_backward(self) -> None:
        """Record that the loop trains on all batches that it has read, with a backward outside any `accumulate` block."""
        self._count_untrained()
        self._record_loaders()

    def _count_untrained(self) -> None:
        """Count the samples of all batches that were read since the latest micro-batch began as trained on.

        This includes batches that the loop collected before their loader ended.
        """
        self.num_samples += sum(self.untrained_samples) + self.num_samples_at_end
        self.untrained_batches.clear()
        self.untrained_samples.clear()
        self.num_samples_at_end = 0

    def _record_loaders(self) -> None:
        """Record all loaders that are being iterated as used in training."""
        active = self.active_loaders
        if active and active[-1] not in self.trained_on:
            self.trained_on.append(active[-1])
        for each in active:
            if each not in self.read_in_training:
                self.read_in_training.append(each)

    # ---------------------------------------------------------------- save, resume and replay

    def record_save(self, is_inside_window: bool) -> None:
        """Record a save. If batches that were read together are trained on before and after it, a warning follows.

        Args:
            is_inside_window: Whether the current accumulation window is unfinished. Its save needs no warning, because
                the resumed run starts the window again and reads its batches again.
        """
        is_in_round = self._ahead.num_in_round > 1 and bool(self.active_loaders)
        self._ahead.was_saved_in_round = is_in_round and not is_inside_window

    def set_num_samples(self, num_samples: int) -> None:
        """Continue the count of samples from that of another state of the run, such as a loaded checkpoint."""
        self.num_samples = num_samples
        self.num_samples_at_end = 0  # samples of an ended pass belong to the former state

    def forget_loaders(self) -> None:
        """Forget which loaders were trained on, because the run continues from a loaded state."""
        self.trained_on.clear()
        self.read_in_training.clear()

    def snapshot(self) -> _ReadAhead:
        """Return the state that `restore` needs to undo a batch.

        The loop around a replayed batch does not repeat what it did before. So the lists of loaders are no part of it.
        """
        return replace(self._ahead)

    def restore(self, snapshot: _ReadAhead) -> None:
        """Undo what was recorded about batches that were read together since `snapshot()`.

        A snapshot can be restored several times.
        """
        self._ahead = replace(snapshot)

    # ---------------------------------------------------------------- queries

    @property
    def loader(self) -> Loader | None:
        """Innermost loader that is being iterated, or None.

        If none of this run's loaders is being iterated, it is the loader that `find_other_loader` returns, if any.
        """
        active = self.active_loaders
        return active[-1] if active else self._find_other_loader()

    @property
    def num_unused_reads(self) -> int:
        """Largest number of batches that any single loader has returned since the last micro-batch began."""
        return max(Counter(map(id, self.untrained_batches)).values(), default=0)

    @property
    def are_read_batches_used(self) -> bool:
        """Whether a loader is being iterated, and no batch has been read since the latest micro-batch began."""
        return bool(self.active_loaders) and not self.untrained_batches
