"""Prepared loader: yields this rank's batches of a user's DataLoader, and describes the current batch.

By default and without workers, a batch of a map-style dataset is fetched only when it is requested, so that a resumed
run draws the same random numbers during the fetch. Even so, the loader knows one step ahead where the data ends.
Iterable datasets are read one batch ahead. In one step, every rank gets one batch. Rows that only complete a batch are
padding.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from headway.core.data.batch_reads import BatchReads
from headway.core.data.feeds.protocol import BatchFeed, State
from headway.core.data.sampling.position import NO_BATCH, Position
from headway.core.data.sampling.shard import ShardIndex, UpdateSize
from headway.core.data.transfer import DeviceTransfer
from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

_EMPTY = (
    "a pass over the loader of %s gave no batch, so nothing was trained or evaluated: the data is empty, or with drop_last=True it "
    "has fewer samples than one batch of all ranks"
)
"""Message of the warning about a pass without batches."""

_FIXED_BY_TORCH = frozenset(["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"])
_FIXED_AT_PREPARE = frozenset(["num_workers", "generator", "multiprocessing_context", "in_order", "pin_memory_device"])
_READ_WHEN_A_PASS_BEGINS = frozenset(["collate_fn", "worker_init_fn", "timeout", "pin_memory", "prefetch_factor"])
"""Names of attributes that the inner loader reads when a pass begins, so that they can be changed between passes."""


class LoaderOrigin(NamedTuple):
    """Place in a loop over `accelerator.epochs()` in which a loader was prepared.

    Attributes:
        epoch: Epoch in which the loader was prepared. A resumed run that prepares it again keeps the number of the first time.
        lines: Source lines that led to `prepare`, innermost first, up to the loop over the epochs (`describe_call_path`).
        previous_epoch: Last earlier epoch in which the same lines prepared a loader. None if there is none.
    """

    epoch: int
    lines: str
    previous_epoch: int | None


@dataclass
class LoaderEvents:
    """Functions that the loaders of a run call around their passes and fetches, and the record of the batches read.

    Attributes:
        reads: Record of the passes in progress, and of the batches that were yielded to the script.
        before_fetch_hooks: Functions called with the loader before each batch is requested, and once before the end is
            found.
        after_fetch_hooks: Functions called with the loader when the batch is on its device, or being copied to it.
        after_pass_hooks: Functions called without arguments when a pass has ended or was left early.
        prepare_hooks: Functions called with each loader that is prepared.
        pass_wrappers: Functions of a loader and the iterator over a pass's (batch, `RankBatch`) pairs. Each returns an
            iterator that may repeat some of the pairs.
        is_registered_for_checkpointing: Function that returns whether the script registered a dataset to be saved in
            checkpoints. Default: False for each dataset.
    """

    reads: "BatchReads[PreparedLoader]" = field(default_factory=BatchReads)
    before_fetch_hooks: list[Callable[["PreparedLoader"], None]] = field(default_factory=list)
    after_fetch_hooks: list[Callable[["PreparedLoader"], None]] = field(default_factory=list)
    after_pass_hooks: list[Callable[[], None]] = field(default_factory=list)
    prepare_hooks: list[Callable[["PreparedLoader"], None]] = field(default_factory=list)
    pass_wrappers: list[Callable[["PreparedLoader", Iterator[Any]], Iterator[Any]]] = field(default_factory=list)
    is_registered_for_checkpointing: Callable[[object], bool] = lambda dataset: False


class LazyIterator(Iterator[Any]):
    """Iterator over one epoch that starts the pass only when the first batch is requested.

    Args:
        start_pass: Function that starts the pass and returns an iterator over its batches.
    """

    def __init__(self, start_pass: Callable[[], Iterator[Any]]) -> None:
        self._start_pass = start_pass
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._start_pass()
        return next(self._batches)


class PreparedLoader(DataLoader[Any]):
    """DataLoader that yields this rank's batches on its device. Created by `accelerator.prepare`.

    It is an instance of DataLoader. Attributes that it lacks are read from the user's loader. Its length is the number
    of batches of this rank. All ranks must iterate over it together, because they get equally many batches. Each pass
    is one epoch. After a resume, the first pass yields only the rest of the interrupted epoch.

    Args:
        user_loader: User's loader.
        feed: Reader of this rank's batches.
        shard: Data shard of this rank.
        device: Device of the batches; None to leave them where the loader creates them.
        transfer: Function that moves batches to the device; None if nothing is moved.
        events: Functions that the run's loaders call, and record of the batches read.
        listeners: Objects whose `set_epoch` is called with each epoch's number.
        draws_order_late: Whether a pass draws its order when the first batch is requested. Otherwise it does so in
            `iter()`, as torch's loaders do. Default: False.
        stall_limit: Seconds for which a read of the dataset may wait for remote storage; 0.0 if the dataset does not
            use remote storage. Default: 0.0.

    Attributes:
        device: Device of the batches; None if they stay where the loader creates them.
        pass_position: Current epoch, number of consumed samples, and `RankBatch` of the current batch (`rank_batch`).
            Code that runs once per batch reads this object directly, which is faster than the loader's properties.
            Loaders returned by `skip` share this object.
        origin: Place in the loop over `accelerator.epochs()` in which the loader was prepared; None outside of such a loop.
        requested_update_size: Size of an update as set by `request_update_size`; `UpdateSize(0, 0)` if not set.
        was_len_called: Whether `len()` of this loader has been called.
        stall_limit: Seconds for which a read of the dataset may wait for remote storage; 0.0 if it never does.
    """

    def __init__(
        self,
        user_loader: DataLoader[Any],
        feed: BatchFeed,
        shard: ShardIndex,
        device: torch.device | None,
        transfer: DeviceTransfer | None,
        events: LoaderEvents,
        listeners: Sequence[Any],
        draws_order_late: bool = False,
        stall_limit: float = 0.0,
    ) -> None:
        # Do not call DataLoader.__init__: the feed's loader reads the data, and this object only has the type.
        self.device = device
        self._user_loader = user_loader
        self._feed = feed
        self._shard = shard
        self._transfer = transfer
        self._events = events
        self._listeners = listeners
        self.pass_position = Position()
        self.origin: LoaderOrigin | None = None
        self.requested_update_size = UpdateSize(0, 0)
        self._draws_order_late = draws_order_late
        self._num_skipped = 0
        self.was_len_called = False
        self.stall_limit = stall_limit

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. Before __init__ (e.g. while unpickling) there is no user's loader.
        if name.startswith("__") or "_user_loader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._user_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this loader.

        The settings `collate_fn`, `worker_init_fn`, `timeout`, `pin_memory` and `prefetch_factor` are set on the user's
        loader and on the loader that reads the data. They take effect with the next pass. An attribute that only the
        user's loader has is set there.

        Raises:
            ValueError: If torch does not allow changes of the setting after construction.
            DataError: If Headway does not allow changes of the setting after prepare(), as for `num_workers`.
        """
        if name in _FIXED_AT_PREPARE:
            raise DataError(
                f"loader.{name} cannot be set after prepare(): it determines how the data are read and divided "
                "among ranks. Set it on the "
                "DataLoader before you prepare() it"
            )
        if name in _READ_WHEN_A_PASS_BEGINS:
            setattr(self._user_loader, name, value)
            self._feed.set_loader_option(name, value)
        elif name in _FIXED_BY_TORCH:
            setattr(self._user_loader, name, value)  # raises torch's ValueError
        elif "_user_loader" in self.__dict__ and name in vars(self._user_loader) and name not in self.__dict__:
            setattr(self._user_loader, name, value)  # methods of the user's own class read it there
        else:
            super().__setattr__(name, value)

    # ---------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass over one epoch, or over the rest of it after `load_state_dict` or `skip`.

        Leaving the loop with `break` ends the epoch, so the next pass reads the next epoch. The pass is empty after
        `stop`, or if `skip_passes` made it empty.
        """
        return LazyIterator(self._start_pass) if self._draws_order_late else self._start_pass()

    def _start_pass(self) -> Iterator[Any]:
        """Draw the random numbers that torch's loader draws in `iter()`, and return an iterator over the batches."""
        if self.pass_position.is_stopped or self.pass_position.take_empty_pass():
            return iter(())
        if self.pass_position.restarts_epoch:
            num_skipped_samples = self._num_skipped * (self._feed.samples_per_step or 0)
            if not self._num_skipped:
                self._rewind_epoch()
            elif num_skipped_samples == self.num_consumed:
                # The loaded state is already at this position, and has the workers' RNG states too.
                self._num_skipped = 0
        # Draw now, not with the first batch: in `zip(one, other)` torch's loaders draw in this order too.
        self._feed.draw_iter_seeds()
        iterator = self._iterate_pass()
        if self.pass_position.is_resume_pending:
            # `zip` may end with another loader's pass before it requests a batch from this one.
            # The loaded epoch then counts as read, as for a pass that was left by `break`.
            finalizer = weakref.finalize(iterator, self._end_epoch_if_unread, self.pass_position.num_passes)
            finalizer.atexit = False
        return iterator

    def _rewind_epoch(self) -> None:
        """Move the loaded position to the start of its epoch or, if all of the epoch was read, to the next epoch."""
        if self._is_at_end():
            self._pass_to_end()
        else:
            self.pass_position.num_consumed = 0

    def _pass_to_end(self) -> None:
        """Run an empty pass over an epoch that was read to its end before the save, to draw its random numbers.

        The next epoch then gets the order that it would have had without the interruption.
        """
        self._feed.draw_iter_seeds()
        for _ in self._iterate_pass():
            pass

    def _is_at_end(self) -> bool:
        """Whether the loaded position is in the last step of its epoch. False if the data has no length."""
        if self.pass_position.is_at_end:
            return True
        try:
            num_steps = len(self._feed)
        except TypeError:
            return False
        samples_per_step = self._feed.samples_per_step
        if samples_per_step is None:
            # The last step cannot be located if steps differ in size, so only a completely read epoch is at its end.
            last_step_start = self.total_dataset_length - 1
        else:
            last_step_start = (num_steps - 1) * samples_per_step
        return self.pass_position.num_consumed > last_step_start

    def _end_epoch_if_unread(self, num_passes: int) -> None:
        """End the loaded epoch if no pass has started since `num_passes` passes had started."""
        if self.pass_position.num_passes == num_passes:
            self.end_loaded_epoch()

    def _iterate_pass(self) -> Iterator[Any]:
        """Yield the batches of a pass, and update `pass_position` and the run's `BatchReads` with each batch."""
        position = self.pass_position
        pass_number = position.start_pass()
        self._announce_epoch(position.epoch)
        self._feed.set_dataset_state_saving(self._events.is_registered_for_checkpointing(self._user_loader.dataset))
        position.num_consumed, deliveries = self._feed.start_pass(
            position.epoch, position.num_consumed, self._num_skipped
        )
        events, reads = self._events, self._events.reads
        for wrap_pass in events.pass_wrappers:
            deliveries = wrap_pass(self, deliveries)
        reads.begin_pass(self)
        is_left = True
        try:
            for hook in events.before_fetch_hooks:
                hook(self)
            for batch, rank_batch in deliveries:
                if self._transfer is not None:
                    batch = self._transfer(batch)
                position.rank_batch = rank_batch
                position.num_consumed_before = position.num_consumed
                position.num_consumed += rank_batch.num_samples
                reads.untrained_batches.append(self)
                reads.untrained_samples.append(rank_batch.num_samples)
                for hook in events.after_fetch_hooks:
                    hook(self)
                yield batch
                if position.is_stopped:
                    is_left = False
                    return
                for hook in events.before_fetch_hooks:
                    hook(self)
            if not position.num_consumed and not self._num_skipped:
                log.warning_once(_EMPTY, type(self.dataset).__name__)
            position.end_epoch()
            is_left = False
        except GeneratorExit as generator_exit:
            position.record_exit(pass_number, generator_exit.__context__)
            raise
        finally:
            self._num_skipped = 0
            reads.end_pass(self, is_left)
            for end_hook in events.after_pass_hooks:
                end_hook()

    def stop(self) -> None:
        """End the current pass after the current batch. Later passes yield nothing until `load_state_dict` is called.

        Unlike `break`, this does not end the epoch. A state that is saved afterwards continues after the current batch.
        """
        self.pass_position.is_stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` has been called since the last call of `load_state_dict`."""
        return self.pass_position.is_stopped

    def __len__(self) -> int:
        """Return the number of batches in a pass on this rank, equal on every rank.

        The length of a loader returned by `skip` does not include the skipped batches until its first pass has ended.

        Raises:
            TypeError: If the data has no length.
        """
        self.was_len_called = True
        return max(0, len(self._feed) - self._num_skipped)

    def count_batches(self) -> int:
        """Return the number of batches in a complete pass on this rank; 0 if unknown.

        Unlike `len()`, it leaves `was_len_called` unchanged.
        """
        try:
            return len(self._feed)
        except TypeError:
            return 0

    def skip(self, num_batches: int) -> "PreparedLoader":
        """Return a loader whose next pass starts at batch `num_batches` of its epoch. Later passes are complete.

        The returned loader and this one share a position, so either can continue with the next epoch.

        Args:
            num_batches: Number of this rank's batches to skip.

        Raises:
            DataError: If the number is negative or not an integer.
        """
        if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
            raise DataError(f"cannot skip {num_batches!r} batches; give a whole number, 0 or more")
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._num_skipped = num_batches
        return view

    # ---------------------------------------------------------------- current batch

    @property
    def is_last(self) -> bool:
        """Whether the current batch is the last of the epoch."""
        return self.pass_position.rank_batch.is_last

    @property
    def num_rows(self) -> int | None:
        """Number of rows in the current batch, including padding; None if they cannot be counted.

        They can always be counted if the loader builds batches (`batch_size` is not None). None before the first batch.
        """
        return self.pass_position.rank_batch.num_rows

    @property
    def valid_counts(self) -> tuple[int, ...] | None:
        """Number of non-padding rows in the current batch of each data shard, indexed by shard; None if unknown.

        Padding rows come last.
        """
        return self.pass_position.rank_batch.valid_counts

    @property
    def num_valid(self) -> int | None:
        """Number of non-padding rows in the current batch of this rank; None if unknown. Padding rows come last."""
        counts = self.pass_position.rank_batch.valid_counts
        return None if counts is None else counts[self._shard.index]

    @property
    def mask(self) -> torch.Tensor | None:
        """Bool tensor of shape [num_rows] on the loader's device; False marks padding rows of the current batch.

        None if the rows cannot be counted, or before the first batch of a pass.
        """
        num_rows, num_valid = self.num_rows, self.num_valid
        if num_rows is None or num_valid is None:
            return None
        return torch.arange(num_rows, device=self.device) < num_valid

    # ---------------------------------------------------------------- position

    @property
    def epoch(self) -> int:
        """Number of the current epoch. Between two passes, number of the next epoch."""
        return self.pass_position.epoch

    @property
    def num_consumed(self) -> int:
        """Number of non-padding samples that this epoch has yielded so far on all ranks together.

        If the loader does not batch (`batch_size=None`), the dataset's items are counted.
        """
        return self.pass_position.num_consumed

    @property
    def num_consumed_before(self) -> int:
        """Number of non-padding samples that this epoch has yielded before the current batch, on all ranks together."""
        return self.pass_position.num_consumed_before

    @property
    def is_running(self) -> bool:
        """Whether a pass is in progress or was left early."""
        return self.pass_position.is_running

    @property
    def is_unfinished(self) -> bool:
        """Whether a run that resumes from a checkpoint saved now would continue the current epoch.

        Also True for a loaded position from which no pass has started yet, and during the last batch of an epoch.
        False if the epoch was left early (by `break`), because the next pass then reads another epoch.
        """
        position = self.pass_position
        return position.is_resume_pending or (position.is_running and not position.is_abandoned)

    @property
    def epoch_at_resume(self) -> int:
        """Number of the epoch that a run reads first if it resumes from a checkpoint saved now.

        While a pass is in progress, this is the current epoch. Otherwise the next pass in this process reads it too.
        """
        return self.pass_position.next_epoch if self.pass_position.is_abandoned else self.pass_position.epoch

    def end_loaded_epoch(self) -> None:
        """End a resumed epoch whose pass has not started yet, so that the next pass reads the next epoch.

        If there is no such epoch, only undo `skip_passes`. A pass in progress is not affected.
        """
        self.pass_position.num_empty_passes = 0
        if self.pass_position.is_resume_pending:
            self.pass_position.end_epoch()
            self._feed.load_state({})

    def skip_passes(self, count: int) -> None:
        """Make the next `count` passes empty. The pass after them resumes at the loaded position.

        This is needed if a resumed script repeats its passes from the first one, although the original run had already
        finished some of them.

        Args:
            count: Number of passes to make empty.
        """
        self.pass_position.num_empty_passes = count

    @property
    def num_passes(self) -> int:
        """Number of passes started in this process. Passes that `skip_passes` made empty are not counted."""
        return self.pass_position.num_passes

    @property
    def has_no_batch_yet(self) -> bool:
        """Whether the latest pass has yielded no batch so far. Also True if no pass has started."""
        return self.pass_position.rank_batch is NO_BATCH

    @property
    def seed(self) -> int:
        """Seed of the sample order and of the workers' random numbers. A change takes effect with the next pass."""
        return self._feed.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._feed.seed = value

    @property
    def depends_on_epoch_number(self) -> bool:
        """Whether the order or the random numbers of a pass are computed from this loader's seed, or from its epoch number."""
        order = getattr(self._feed, "order", None)
        is_order_computed = getattr(order, "is_shuffled", False) or getattr(order, "is_seedable", False)
        return bool(is_order_computed or self._listeners)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Also call `set_epoch` of the samplers and datasets that have this method.

        A loaded position is discarded if it belongs to another epoch.

        Args:
            epoch: Number of the epoch.
        """
        if self.pass_position.is_resume_pending and epoch != self.pass_position.epoch and self._is_at_end():
            self._pass_to_end()  # the state was saved while the last batch was being processed
        if not self.pass_position.set_next_epoch(epoch):
            self._feed.load_state({})  # the loaded state belongs to another epoch
        self._announce_epoch(epoch)

    def _announce_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the samplers and datasets that have this method."""
        for listener in self._listeners:
            listener.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the loader's position and the state of its sampler or dataset.

        The position has the keys "epoch" and "consumed". It also has "is_over" if the current batch is the last of the
        epoch. The key "source" holds the state of the sampler or dataset, if any. The result is equal on every rank,
        except that a StatefulDataLoader adds the state of this rank's own shards.
        """
        feed_state = self._feed.state(self.pass_position.is_running)
        return {**self.pass_position.state_dict(), **({"source": feed_state} if feed_state else {})}

    def checkpoint_state(self, is_brief: bool = False) -> State:
        """Return this loader's entry in a checkpoint of the run, with the keys of `state_dict`.

        Unlike in `state_dict`, a pass that was left early (by `break`) counts as finished.

        Args:
            is_brief: Whether to leave out states that are valid only for the latest batch. The result is then small,
                and a run can still resume at the current batch. Default: False.
        """
        position = self.pass_position
        if position.is_abandoned:
            feed_state = self._feed.state_after_break()
            return {"epoch": position.next_epoch, "consumed": 0, **({"source": feed_state} if feed_state else {})}
        if not is_brief:
            return self.state_dict()
        feed_state = self._feed.position_state() if position.is_running else self._feed.state(False)
        return {**position.state_dict(), "source": feed_state}

    def load_state_dict(self, state: State) -> None:
        """Load a saved position, from which the next pass resumes. The world size may have changed since the save.

        Consumed samples of a map-style dataset are usually not fetched.

        Args:
            state: State returned by `state_dict` or `checkpoint_state`.

        Raises:
            StateError: If `state` lacks "epoch" or "consumed".
        """
        self.pass_position.load_state_dict(state)
        self._feed.load_state(state.get("source", {}))

    def restart_loaded_epoch(self) -> None:
        """Make the next pass read the loaded epoch again from its first batch, in the original order.

        Do nothing if no position inside an epoch was loaded. Batches that the script skips with `skip` are still
        skipped. If the state was saved after the last batch of its epoch, the next pass reads the next epoch.
        """
        self.pass_position.restarts_epoch = self.pass_position.is_resume_pending

    # ---------------------------------------------------------------- sizes and settings

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples that all ranks together get per step; None if it varies.

        If the loader does not batch (`batch_size=None`), the dataset's items are counted.
        """
        return self._feed.samples_per_step

    @property
    def configured_samples_per_step(self) -> int | None:
        """Number of samples per step over all ranks, as configured in the user's DataLoader; None if it varies.

        A resumed run may use other batch sizes to keep the number of samples per update. `total_batch_size` then
        differs from this number.
        """
        return self._feed.configured_samples_per_step

    def can_fit_update(self, samples_per_update: int, num_steps: int) -> bool:
        """Whether `num_steps` batches per rank can hold `samples_per_update` samples per update.

        Batches may be smaller than the configured batch size, but not larger.

        Args:
            samples_per_update: Number of samples per gradient update over all ranks.
            num_steps: Number of batches per rank and update.
        """
        return self._feed.can_fit_update(samples_per_update, num_steps)

    def request_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int) -> None:
        """Use the number of samples per gradient update that the script requests, from the next pass on.

        The first two values are stored in `requested_update_size`. In contrast, `set_update_size` is used for the number
        that a checkpoint requires, and does not change `requested_update_size`.

        Args:
            samples_per_update: Number of samples per update, over all ranks.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples.
        """
        self.requested_update_size = UpdateSize(samples_per_update, num_steps)
        self.set_update_size(samples_per_update, num_steps, drop_multiple)

    def set_update_size(self, samples_per_update: int, num_steps: int, drop_multiple: int = 1) -> None:
        """Use `samples_per_update` samples per gradient update from the next pass on.

        Args:
            samples_per_update: Number of samples per update, over all ranks; 0 to return to this loader's settings.
            num_steps: Number of batches per rank and update.
            drop_multiple: With drop_last, an incomplete last update is truncated to a multiple of this number of
                samples. Default: 1.
        """
        self._feed.set_update_size(samples_per_update, num_steps, drop_multiple)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset.

        Raises:
            TypeError: If the dataset has no length.
        """
        return len(self._user_loader.dataset)  # type: ignore[arg-type]

    @property
    def even_batches(self) -> bool:
        """Whether an incomplete last step is completed with repeated samples, so that every rank gets a full batch.

        A change takes effect with the next pass. The value stays False if there is only one data shard.
        """
        return self._feed.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        # A single rank has nothing to even out.
        self._feed.even_batches = value and self._shard.count > 1
