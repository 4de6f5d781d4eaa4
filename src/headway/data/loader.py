"""The prepared loader: the user's DataLoader, reading this rank's share, and what is known about the batch in hand.

The next batch is never fetched before it is asked for where the data has indices: their end is known one step ahead
without that, and random numbers drawn while fetching in this process are then exactly resumable. Streams are read one
batch ahead.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from headway.data.feeds import BatchFeed, State
from headway.data.sampling.position import NOTHING, Position
from headway.data.sampling.shard import ShardIndex
from headway.data.transfer import DeviceTransfer
from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

_EMPTY = (
    "a pass over the loader of %s gave no batch, so that nothing is trained or evaluated on: it is empty, or it holds less than a "
    "batch of all ranks and drop_last=True"
)


@dataclass
class LoaderEvents:
    """What the loaders of one run tell: which are in iteration, and to whoever listens, when they fetch.

    A loop may ask one loader while it holds another's batch: in `zip(one, other)`, or in an evaluation that comes before the
    training on the batch in hand; or it collects the micro-batches of an update before it trains on the first. A state taken
    there would count these batches as done, and a resumed run would leave them out.

    Attributes:
        active: loaders in iteration, innermost last.
        in_hand: loaders in iteration, once for each batch that they gave and no micro-batch has begun with, in that order; a
            micro-batch takes them all.
        asked: called before a batch is asked for.
        came: called when it is there, on its device or on its way to it.
        left: called when a pass is over, or was broken off.
        repeats: given a pass's deliveries, give the same and perhaps some of them once more.
    """

    active: list["PreparedLoader"] = field(default_factory=list)
    in_hand: list["PreparedLoader"] = field(default_factory=list)
    asked: list[Callable[["PreparedLoader"], None]] = field(default_factory=list)
    came: list[Callable[["PreparedLoader"], None]] = field(default_factory=list)
    left: list[Callable[[], None]] = field(default_factory=list)
    repeats: list[Callable[["PreparedLoader", Iterator[Any]], Iterator[Any]]] = field(default_factory=list)

    def is_free(self, loader: "PreparedLoader", most: int = 1) -> bool:
        """`loader` is asked: may the run end before, as no batch is in hand?

        Args:
            loader: which one.
            most: so many of its batches may wait to be trained on together. With more, those that it gave have been used or
                dropped, and so have those that were read inside its loop.
        """
        if self.in_hand.count(loader) >= most:
            del self.in_hand[self.in_hand.index(loader) :]
        return not self.in_hand

    def leave(self, loader: "PreparedLoader") -> None:
        """Its latest pass is over: a loader may be in iteration several times."""
        self.in_hand[:] = [each for each in self.in_hand if each is not loader]
        for index in reversed(range(len(self.active))):
            if self.active[index] is loader:
                del self.active[index]
                return


class LazyIterator(Iterator[Any]):
    """A pass that begins when its first batch is asked for; one that never is leaves no trace.

    Args:
        open_pass: begins it.
    """

    def __init__(self, open_pass: Callable[[], Iterator[Any]]) -> None:
        self._open_pass = open_pass
        self._pass: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = self._open_pass()
        return next(self._pass)


class PreparedLoader(DataLoader[Any]):
    """Yields this rank's batches on its device; `accelerator.prepare` makes it.

    It is a DataLoader by type; attributes it does not have itself are those of the user's loader.

    Args:
        source: the user's loader.
        feed: reads the batches.
        shard: this rank's part of the data.
        device: where batches go; None: they stay where the loader made them.
        transfer: brings them there; None: they are there.
        events: of the run's loaders.
        listeners: objects whose set_epoch is told each epoch's number.
        opens_late: a pass draws its order with its first batch; False: when `iter` is called, as torch's loaders do.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        feed: BatchFeed,
        shard: ShardIndex,
        device: torch.device | None,
        transfer: DeviceTransfer | None,
        events: LoaderEvents,
        listeners: Sequence[Any],
        opens_late: bool = False,
    ) -> None:
        # Not DataLoader.__init__: the loader that reads is the feed's, this one only has the type.
        self.device, self._source, self._feed, self._shard = device, source, feed, shard
        self._transfer, self._events, self._listeners = transfer, events, listeners
        self._position = Position()
        self.asked_window = (0, 0)
        self._opens_late = opens_late
        self._num_skipped = 0

    def __getattr__(self, name: str) -> Any:
        # Asked for only where this object lacks it; before __init__ (e.g. while unpickling) there is no source.
        if name.startswith("__") or "_source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._source, name)

    # ---------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """One pass; `break` closes it, and the next pass is another epoch."""
        return LazyIterator(self._open) if self._opens_late else self._open()

    def _open(self) -> Iterator[Any]:
        if self._position.is_stopped or self._position.is_over_already():
            return iter(())
        if self._position.is_from_start and not self._num_skipped:
            self._go_to_start()
        elif self._position.is_from_start and self._num_skipped * (self._feed.round_size or 0) == self.num_consumed:
            self._num_skipped = 0  # the state that was loaded says as much, and what workers have drawn
        # Now, not with the first batch: in `zip(one, other)` torch's loaders draw in this order too.
        self._feed.open()
        iterator = self._pass()
        if self._position.is_waiting:
            # `zip` may end with another loader's pass before it has asked this one for anything.
            weakref.finalize(iterator, self._end_unbegun, self._position.num_passes).atexit = False
        return iterator

    def _go_to_start(self) -> None:
        if self._is_at_end():
            self._pass_to_end()
        else:
            self._position.consumed = 0

    def _pass_to_end(self) -> None:
        """An empty pass: what the epoch drew is drawn, and the next one's order comes after it."""
        self._feed.open()
        for _ in self._pass():
            pass

    def _is_at_end(self) -> bool:
        if self._position.is_at_end:
            return True
        try:
            num_rounds = len(self._feed)
        except TypeError:
            return False
        size = self._feed.round_size
        first_of_last = self.total_dataset_length - 1 if size is None else (num_rounds - 1) * size
        return self._position.consumed > first_of_last

    def _end_unbegun(self, num_passes: int) -> None:
        if self._position.num_passes == num_passes:
            self.end_epoch()

    def _pass(self) -> Iterator[Any]:
        position = self._position
        number = position.begin()
        self._tell_epoch(position.epoch)
        position.consumed, deliveries = self._feed.start(position.epoch, position.consumed, self._num_skipped)
        events = self._events
        for repeat in events.repeats:
            deliveries = repeat(self, deliveries)
        events.active.append(self)
        try:
            for told in events.asked:
                told(self)
            for batch, share in deliveries:
                if self._transfer is not None:
                    batch = self._transfer(batch)
                position.share = share
                position.previous = position.consumed
                position.consumed += share.num_samples
                events.in_hand.append(self)
                for told in events.came:
                    told(self)
                yield batch
                if position.is_stopped:
                    return
                for told in events.asked:
                    told(self)
            if not position.consumed and not self._num_skipped:
                log.warning_once(_EMPTY, type(self.dataset).__name__)
            position.finish()
        except GeneratorExit as left:
            position.leave(number, left.__context__)
            raise
        finally:
            self._num_skipped = 0
            events.leave(self)
            for end in events.left:
                end()

    def stop(self) -> None:
        """End the pass in progress after the batch in hand, as `break` does; later passes are empty until a state is loaded."""
        self._position.is_stopped = True

    @property
    def is_stopped(self) -> bool:
        """Has `stop` been called?"""
        return self._position.is_stopped

    def __len__(self) -> int:
        """Batches of a pass on this rank, the same on every rank (TypeError where the data has no length)."""
        return max(0, len(self._feed) - self._num_skipped)

    def skip(self, num_batches: int) -> "PreparedLoader":
        """A view of this loader whose next pass begins at batch `num_batches` of its epoch; later passes are whole.

        The view and this loader share their position, so either may go on with the next epoch.

        Raises:
            DataError: the number is negative or no integer.
        """
        if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
            raise DataError(f"cannot skip {num_batches!r} batches; give a whole number, 0 or more")
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._num_skipped = num_batches
        return view

    # ---------------------------------------------------------------- the batch last yielded

    @property
    def is_last(self) -> bool:
        """Is it the epoch's last?"""
        return self._position.share.is_last

    @property
    def num_rows(self) -> int | None:
        """Its rows, repeats included: the samples it was made of. None for an unbatched item without rows."""
        return self._position.share.num_rows

    @property
    def valid_counts(self) -> tuple[int, ...] | None:
        """For each data rank, how many leading rows of its batch are real; what follows them only fills the batch."""
        return self._position.share.valid_counts

    @property
    def num_valid(self) -> int | None:
        """How many of its leading rows are real."""
        counts = self._position.share.valid_counts
        return None if counts is None else counts[self._shard.index]

    @property
    def mask(self) -> torch.Tensor | None:
        """Shape [num_rows], bool, on the batch's device: True for real rows."""
        num_rows, num_valid = self.num_rows, self.num_valid
        if num_rows is None or num_valid is None:
            return None
        return torch.arange(num_rows, device=self.device) < num_valid

    # ---------------------------------------------------------------- position

    @property
    def epoch(self) -> int:
        """The number of the pass in progress; between two, of the next one."""
        return self._position.epoch

    @property
    def num_consumed(self) -> int:
        """Real samples of all ranks yielded in this epoch (items, where the loader does not batch)."""
        return self._position.consumed

    @property
    def num_consumed_before(self) -> int:
        """The same before the batch last yielded."""
        return self._position.previous

    @property
    def is_running(self) -> bool:
        """Is an epoch in progress, or was it broken off?"""
        return self._position.is_running

    @property
    def is_unfinished(self) -> bool:
        """Does this process, or a run resumed now, go on in the middle of an epoch? Not in one that was broken off."""
        position = self._position
        return position.is_waiting or (position.is_running and not position.is_left)

    @property
    def next_epoch(self) -> int:
        """The epoch that this process, or a run resumed now, goes on in."""
        return self._position.following if self._position.is_left else self._position.epoch

    def end_epoch(self) -> None:
        """The loop's epoch is over; a pass that was to go on in it, and has not begun, is over too."""
        self._position.num_over = 0
        if self._position.is_waiting:
            self._position.finish()
            self._feed.load_state({})

    def pass_over(self, count: int) -> None:
        """Let the next `count` passes be empty, and the one after them go on from here: the run has made them already."""
        self._position.num_over = count

    @property
    def num_passes(self) -> int:
        """Passes begun in this process, without those that were empty as they had been made already."""
        return self._position.num_passes

    @property
    def is_fresh(self) -> bool:
        """Is no batch of this pass yielded yet?"""
        return self._position.share is NOTHING

    @property
    def seed(self) -> int:
        """What its order and its workers' random numbers come from; settable until the next pass begins."""
        return self._feed.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._feed.seed = value

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch; the user's sampler, batch sampler and dataset are told where they can be."""
        if self._position.is_waiting and epoch != self._position.epoch and self._is_at_end():
            self._pass_to_end()  # the state was saved with the last batch in hand
        if not self._position.pin(epoch):
            self._feed.load_state({})  # what was loaded belongs to another epoch
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for listener in self._listeners:
            listener.set_epoch(epoch)

    def state_dict(self) -> State:
        """Where this loader stands: `epoch`, `consumed`, and under `source` what a custom sampler or stream adds.

        The same on every rank, but for the state that a StatefulDataLoader keeps of this rank's own shards.
        """
        source = self._feed.state(self._position.is_running)
        return {**self._position.state_dict(), **({"source": source} if source else {})}

    def run_state(self, is_brief: bool = False) -> State:
        """What the state of a run holds of this loader: as `state_dict`, but for a pass that was broken off, which is over.

        Args:
            is_brief: cheap, without what only serves the very batch last read: for a state that goes back here later.
        """
        position = self._position
        if position.is_left:
            left = self._feed.left()
            return {"epoch": position.following, "consumed": 0, **({"source": left} if left else {})}
        if not is_brief:
            return self.state_dict()
        source = self._feed.mark() if position.is_running else self._feed.state(False)
        return {**position.state_dict(), "source": source}

    def load_state_dict(self, state: State) -> None:
        """Let the next pass go on from there, on any number of ranks; samples consumed before are not fetched.

        Raises:
            StateError: this is not a loader's state.
        """
        self._position.load_state_dict(state)
        self._feed.load_state(state.get("source", {}))

    def read_from_start(self) -> None:
        """Of a loaded state, let the next pass keep the epoch and its order, and begin at its first batch or where `skip` says.

        One that was saved behind its epoch's last batch begins the next epoch.
        """
        self._position.is_from_start = self._position.is_waiting

    # ---------------------------------------------------------------- sizes and settings

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks together get per step; None where batches vary in size."""
        return self._feed.round_size

    @property
    def step_size(self) -> int | None:
        """The same by this loader's own settings, where a resumed run splits its batches otherwise."""
        return self._feed.step_size

    def fits_window(self, window: int, num_rounds: int) -> bool:
        """Can `window` samples be given out in `num_rounds` rounds, none of them larger than this loader's own?"""
        return self._feed.fits_window(window, num_rounds)

    def ask_window(self, window: int, num_rounds: int, unit: int) -> None:
        """`keep_window` from the beginning of the run, by what the script asks for and not by a checkpoint."""
        self.asked_window = (window, num_rounds)
        self.keep_window(window, num_rounds, unit)

    def keep_window(self, window: int, num_rounds: int, unit: int = 1) -> None:
        """Give them out so from the next pass on; a window of 0: as this loader's settings say.

        Args:
            window: samples of one update, over all ranks.
            num_rounds: batches of each rank that they make.
            unit: with drop_last, the samples that an incomplete end is dropped by.
        """
        self._feed.keep_window(window, num_rounds, unit)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self._source.dataset)  # type: ignore[arg-type]

    @property
    def even_batches(self) -> bool:
        """Are incomplete rounds completed with repeated samples? Takes effect with the next pass."""
        return self._feed.is_even

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        # One rank alone has nothing to even out.
        self._feed.is_even = value and self._shard.count > 1
