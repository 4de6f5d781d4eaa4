"""Progress of a training loop through its epochs and loaders, for saves in the middle of an epoch."""

from collections.abc import Callable
from types import CodeType

from headway.core.checkpoint.resume.dropped_loaders import find_dropped_loaders
from headway.core.checkpoint.resume.evaluations import EvaluationDetector, EvaluationStart
from headway.core.checkpoint.resume.later_loaders import LaterLoaders, describe_call_path, find_loop_code
from headway.core.checkpoint.resume.local_sgd_state import LocalSGDState
from headway.core.checkpoint.resume.objects import CheckpointedObjects
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.resume.training_passes import TrainingPasses
from headway.core.checkpoint.resume.window_snapshot import ForwardStateCopies, WindowSnapshot
from headway.core.data.loader import LoaderOrigin, PreparedLoader
from headway.core.data.sampling.position import NO_BATCH
from headway.log import get_logger

log = get_logger(__name__)

_SAVED_BETWEEN_LOOPS = (
    "a checkpoint was saved between two loops of epoch %d that train: it counts as saved at the epoch's end, and a run "
    "resumed from it leaves out the rest of the epoch. Save within the loops, or after the last of them"
)

_REPEATS_EPOCH = (
    "a checkpoint was saved at the end of epoch %d, but a run that resumes from it trains in this epoch again: the loop reads no "
    "prepared loader, whose position would show that the epoch was over. Save at the start of the next epoch instead: "
    "`for epoch in accelerator.epochs(num_epochs):`, and then `if epoch: accelerator.save_state()`. After the last epoch, save after "
    "the loop"
)


class LoopProgress:
    """Progress of one run's training loop, from which a checkpoint gets the position of the run.

    It is updated by hooks of the loaders.

    Args:
        objects: Objects of the run.
        local: Object that collects and restores the state that differs between ranks under local SGD.

    Attributes:
        epoch: Number of the loop's current epoch.
        passes: Finished passes over loaders in the current epoch.
        evaluations: Detector of evaluations, with the positions to store if a save is made during one.
        window_start: Snapshot of the start of the current accumulation window, or None. A run resumed from a save
            within the window continues there.
        before_training_batch: Functions called before each batch of a training loader, while no other batch is in use.
        reads_from_start: Whether loaders prepared after a load begin the interrupted epoch at its first batch.
    """

    def __init__(self, objects: CheckpointedObjects, local: LocalSGDState) -> None:
        self.epoch = 0
        self.before_training_batch: list[Callable[[PreparedLoader], None]] = []
        self.reads_from_start = False
        self.window_start: WindowSnapshot | None = None
        self._objects = objects
        self._local = local
        self._windows = objects.run.windows
        self._events = objects.run.events
        self._expects_saves = False  # whether to record the RNG states and buffers at the start of each window
        self._preemption_check: Callable[[PreparedLoader], None] | None = None  # called before each batch
        self._epoch_starts: dict[int, int] | None = None
        """Epoch of each loader when the loop's current epoch began, by the loader's seed.

        None if the loop does not use epochs().
        """
        self._num_windows_at_epoch_end_save: int | None = None
        """Number of accumulation windows begun before a save that recorded the current epoch as finished.

        None if there was no such save.
        """
        self._num_windows_at_epoch_start = 0
        self._num_windows_at_repeating_save: int | None = None
        """Number of accumulation windows at the last save from which a resumed run would repeat the current epoch.

        None if there was no save in this epoch, or if the loop reads prepared loaders.
        """
        self._later_loaders: LaterLoaders | None = None
        """Saved positions of loaders that the script prepares after the load. None if there are no such loaders."""
        self._is_in_epoch = False
        """Whether the loop is in an epoch of `epochs()`."""
        self._loop_code: CodeType | None = None
        """Code of the function that iterates over `epochs()`. None if there is none yet."""
        self._last_preparations: dict[str, tuple[int, int | None]] = {}
        """Last two epochs in which loaders were prepared, by the lines that prepared them. The second can be None."""
        self.passes = TrainingPasses(self._windows, objects.loaders)
        self.evaluations = EvaluationDetector(
            accumulation=self._windows,
            loaders=objects.loaders,
            read_rng_states=objects.read_rng_states,
            compute_next_epoch=self.compute_next_epoch,
            passes=self.passes,
            schedules=objects.preparation.schedulers,
        )
        self._events.is_registered_for_checkpointing = lambda dataset: any(
            dataset is each for each in objects.run.custom
        )
        self._events.prepare_hooks.append(self._restore_later_loader)
        self._events.before_fetch_hooks.append(self._before_fetch)

    # ---------------------------------------------------------------- the present position

    @property
    def counts_epochs(self) -> bool:
        """Whether the training loop iterates over `accelerator.epochs()`."""
        return self._epoch_starts is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a prepared loader has been stopped, so that no further epoch should begin."""
        return any(loader.is_stopped for loader in self._objects.loaders)

    @property
    def is_without_loader(self) -> bool:
        """Whether no prepared loader is being iterated and automatic micro-batching is not splitting a batch."""
        return not self._windows.reads.active_loaders and not self._windows.is_in_splittable_batch

    def get_position(self, evaluation_start: EvaluationStart | None = None) -> tuple[object, ...]:
        """Return the position of the run as a tuple.

        Checkpoints that are saved at equal positions have equal content, apart from registered objects.

        Args:
            evaluation_start: State at the start of the evaluation in progress, whose loader positions are used. Default: None,
                the current positions.
        """
        states = (
            [each.checkpoint_state() for each in self._objects.loaders]
            if evaluation_start is None
            else evaluation_start.loader_states
        )
        positions = [(each["epoch"], each["consumed"]) for each in states]
        windows = self._windows
        return self._objects.run.clock.num_updates, windows.num_windows, windows.is_unfinished, *positions

    def find_evaluation_start(self) -> EvaluationStart | None:
        """Return the state at the start of the evaluation in progress, from which a resumed run continues.

        Return None if no evaluation is in progress.
        """
        return self.evaluations.find_start(reenters_epoch=self.counts_epochs)

    # ---------------------------------------------------------------- epochs of the loop

    def compute_next_epoch(self) -> int:
        """Return the epoch at which a run would continue if it resumed from a save of the current position."""
        trained_on = self._windows.reads.trained_on
        epoch_starts = self._epoch_starts
        if not trained_on:
            return self.epoch
        if epoch_starts is None:  # the loop does not use epochs(): the first loader counts
            return trained_on[0].epoch_at_resume
        if any(each.is_unfinished for each in trained_on):
            return self.epoch
        has_advanced = any(each.epoch_at_resume != epoch_starts.get(each.seed, 0) for each in trained_on)
        return self.epoch + 1 if has_advanced else self.epoch

    def begin_epoch(self) -> None:
        """Record the start of an epoch of the training loop."""
        self._is_in_epoch = True
        self._loop_code = find_loop_code()
        self._release_dropped_loaders()
        self.passes.begin_epoch()
        self._num_windows_at_epoch_end_save = None
        self._num_windows_at_epoch_start = self._windows.num_windows
        self._num_windows_at_repeating_save = None
        self._record_epoch_starts()

    def _release_dropped_loaders(self) -> None:
        """Release loaders that were prepared in earlier epochs, and that the script has dropped. All ranks must call it.

        Do nothing while any rank is inside an accumulation window or an evaluation, whose start refers to the loaders by
        their positions in the list.
        """

        def may_release() -> bool:
            return not self._windows.is_unfinished and self.find_evaluation_start() is None

        reads, loaders = self._windows.reads, self._objects.loaders
        lists = [reads.trained_on, reads.read_in_training]
        everyone = self._objects.run.collectives
        for index in find_dropped_loaders(loaders, lists, self.epoch, everyone, may_release):
            for others in lists:
                others[:] = [each for each in others if each is not loaders[index]]
            self._objects.run.prepared.release_loader(index)
            if self.window_start is not None:
                del self.window_start.loaders[index : index + 1]

    def end_epoch(self) -> None:
        """Record the end of an epoch of the training loop."""
        for loader in self._objects.loaders:
            loader.end_loaded_epoch()
        if self._later_loaders is not None:
            if not self._later_loaders.is_epoch_over:
                self._later_loaders.warn_of_lost_positions()
            self._later_loaders.is_epoch_over = True
        self.passes.end_epoch()
        num_windows = self._num_windows_at_repeating_save
        if num_windows is not None and num_windows == self._windows.num_windows:
            log.warning_once(_REPEATS_EPOCH, self.epoch)
        self._is_in_epoch = False
        self._num_windows_at_epoch_end_save = None
        self.epoch += 1
        self._record_epoch_starts()

    def _record_epoch_starts(self) -> None:
        """Record for each loader, by its seed, the epoch at which a resumed run would continue."""
        self._epoch_starts = {each.seed: each.epoch_at_resume for each in self._objects.loaders}

    def record_saved_epoch(self, epoch: int) -> None:
        """Record a save, for a warning if a resumed run would leave out or repeat a part of the current epoch.

        Do nothing if the loop does not use `epochs()`.

        Args:
            epoch: Epoch at which a run that resumes from the checkpoint being saved would continue.
        """
        if self.counts_epochs and epoch > self.epoch:
            self._num_windows_at_epoch_end_save = self._windows.num_windows
        has_trained = self._windows.num_windows > self._num_windows_at_epoch_start
        if self._is_in_epoch and epoch == self.epoch and has_trained and not self._windows.reads.trained_on:
            self._num_windows_at_repeating_save = self._windows.num_windows

    def _check_saved_epoch(self) -> None:
        """Warn if training continues in an epoch that a saved checkpoint has already recorded as finished."""
        if (
            self._num_windows_at_epoch_end_save is not None
            and self._windows.num_windows > self._num_windows_at_epoch_end_save
        ):
            self._num_windows_at_epoch_end_save = None
            log.warning_once(_SAVED_BETWEEN_LOOPS, self.epoch)

    # ---------------------------------------------------------------- before each batch

    def expect_saves(self) -> None:
        """Include all state that a save needs in later snapshots of the starts of accumulation windows.

        This adds the RNG states and copies of the models' buffers and extra states.
        """
        self._expects_saves = True

    def set_preemption_check(self, check: Callable[[PreparedLoader], None] | None) -> None:
        """Set the function to call before each batch of a prepared loader, while no other batch is in use.

        Args:
            check: Function of the loader, which may save and end the run. It replaces an earlier one. None: no function
                is called.
        """
        self._preemption_check = check

    def _before_fetch(self, loader: PreparedLoader) -> None:
        """Update all recorded positions before a batch is fetched, and call the registered functions.

        Args:
            loader: Loader whose next batch is requested.
        """
        # Usually each batch is trained on before the next one is requested. Then the run can be saved or stopped here.
        has_no_batch_in_use = not self._windows.reads.untrained_batches or self._has_used_batches(loader)
        if self._epoch_starts is not None:
            self.passes.record_request(loader)
            self._check_saved_epoch()
        if has_no_batch_in_use and self._windows.num_steps > 1:
            self._record_window_start()
        rank_batch = loader.pass_position.rank_batch
        if rank_batch is NO_BATCH or rank_batch.is_last:  # a pass begins, or ends
            self.evaluations.record_request(loader)
        if self._preemption_check is not None and has_no_batch_in_use:
            self._preemption_check(loader)
        if self.before_training_batch and has_no_batch_in_use and self._is_trained_on(loader):
            for action in self.before_training_batch:
                action(loader)

    def _has_used_batches(self, loader: PreparedLoader) -> bool:
        """Whether every batch that was yielded since the last micro-batch has been trained on or dropped.

        Called when `loader` is about to yield its next batch.

        Args:
            loader: Loader whose next batch is requested.
        """
        # A loop can read all micro-batches of an update before it trains on them, but only from a training loader.
        may_collect = not self._windows.reads.trained_on or self._is_trained_on(loader)
        return self._windows.reads.forget_dropped_batches(loader, self._windows.num_steps if may_collect else 1)

    def _is_trained_on(self, loader: PreparedLoader) -> bool:
        return any(each.seed == loader.seed for each in self._windows.reads.trained_on)

    def _record_window_start(self) -> None:
        """Record the state at the start of an accumulation window, which a save within the window needs.

        Do nothing if a window is already open.
        """
        if self._windows.is_unfinished:
            return
        objects = self._objects
        rng_states = None
        forward_state = None
        if self._expects_saves:
            rng_states = objects.read_rng_states()  # about 90 us
            if self.window_start is not None:
                forward_state = self.window_start.forward_state  # its memory is reused
            if forward_state is None:
                forward_state = ForwardStateCopies()
            forward_state.record_state(objects.list_bare_models())
        epoch = self.compute_next_epoch()
        self.window_start = WindowSnapshot(
            rng_states=rng_states,
            loaders=[each.checkpoint_state(is_brief=True) for each in objects.loaders],
            epoch=epoch,
            finished_passes=self.passes.count_finished() if self.counts_epochs and epoch == self.epoch else {},
            num_calls=[each.num_calls for each in objects.preparation.schedulers],
            local_steps=self._local.list_steps(),
            pieces=objects.read_piece_size(),
            seen=objects.run.seen.read_counts(),
            forward_state=forward_state,
        )

    # ---------------------------------------------------------------- after a load

    def restore(self, saved_run: SavedRun, is_data_replaced: bool) -> None:
        """Set the progress to that of a saved run.

        Args:
            saved_run: Counters and positions of the saved run.
            is_data_replaced: Whether the loaders' data was replaced, so that the epoch starts over.
        """
        loaders = self._objects.loaders
        self.epoch = saved_run.epoch
        self.window_start = None
        self._num_windows_at_epoch_end_save = None
        self._epoch_starts = None
        if saved_run.counts_epochs:
            self._record_epoch_starts()
        self.passes.restore([] if is_data_replaced else saved_run.passes_over)
        self.evaluations.discard_positions()
        num_numbered = len(saved_run.loaders) + saved_run.num_absent_loaders
        self._objects.run.prepared.num_absent_loaders = max(0, num_numbered - len(loaders))
        self._last_preparations = {}
        for lines, epoch, previous in zip(saved_run.prepared_by, saved_run.prepared_in, saved_run.prepared_before):
            if epoch is not None:
                self._last_preparations[lines] = epoch, previous
        self._later_loaders = None
        if len(saved_run.loaders) > len(loaders):
            self._later_loaders = LaterLoaders(saved_run, is_data_replaced, continued=set(range(len(loaders))))

    def _restore_later_loader(self, loader: PreparedLoader) -> None:
        """Record where a loader is prepared. Restore its position if it continues a saved one."""
        loader.origin = self._describe_origin() if self._is_in_epoch else None
        later = self._later_loaders
        index = None if later is None else later.continue_position(self._objects.loaders, self._objects.run.collectives)
        if loader.origin is not None:
            self._last_preparations[loader.origin.lines] = loader.origin.epoch, loader.origin.previous_epoch
        if later is None or index is None:
            return
        # The loader takes the place of a saved one, so it does not count among the loaders prepared since.
        prepared = self._objects.run.prepared
        prepared.num_absent_loaders = max(0, prepared.num_absent_loaders - 1)
        saved_run = later.saved_run
        if index in saved_run.trained_on:
            self._windows.reads.trained_on.append(loader)
        if index in saved_run.read_in_training:
            self._windows.reads.read_in_training.append(loader)
        if self._epoch_starts is not None:
            self._epoch_starts[loader.seed] = loader.epoch_at_resume
        if not (later.is_data_replaced or later.is_epoch_over):
            self.passes.restore_loader(loader, saved_run.passes_over[index])
        if later.is_epoch_over:
            loader.end_loaded_epoch()
        if self.reads_from_start:
            loader.restart_loaded_epoch()

    def _describe_origin(self) -> LoaderOrigin:
        """Return the place in the loop in which a loader is prepared, as if this were a new loader."""
        lines = describe_call_path(self._loop_code)
        last_epoch, previous_epoch = self._last_preparations.get(lines, (None, None))
        return LoaderOrigin(self.epoch, lines, previous_epoch if last_epoch == self.epoch else last_epoch)
