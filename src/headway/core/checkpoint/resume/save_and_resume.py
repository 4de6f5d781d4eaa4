"""Save and resume a run: the implementation of `save_state`, `load_state`, `resume` and `epochs`."""

import math
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.common.object_path import to_path
from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.checkpoint.format.manifest import MANIFEST
from headway.core.checkpoint.resume.after_interrupt import add_interrupt_advice, publish_resume_advice
from headway.core.checkpoint.resume.arguments import parse_changed
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.checkpoint.resume.evaluations import EvaluationStart
from headway.core.checkpoint.resume.hooks import CheckpointHooks, SaveHook, make_staging_hooks
from headway.core.checkpoint.resume.run_lock import RunLock
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.core.checkpoint.saving.job import SavePolicy
from headway.core.checkpoint.state import CollectedState
from headway.core.config.preemption import Preemption
from headway.core.config.run import ProjectConfiguration
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.control_plane.attendance import SAVE_CALL, Attendance, CallParticipants
from headway.core.runtime.events import RunEvent, subscribe
from headway.core.training.hooks import StepHooks
from headway.errors import CheckpointDamaged, CheckpointError, ConfigError, StateError
from headway.log import get_logger

log = get_logger(__name__)

_WITHIN_EPOCH = (
    "a checkpoint is saved inside an evaluation in the middle of an epoch: a run resumed from it goes on with the next training "
    "batch and does not repeat this evaluation. Save before or after it to keep both"
)
_NOTHING_LEFT = (
    "nothing is left to train: resumed after %d of %d epochs; train for more epochs, or start again in another folder"
)
_NOT_AUTOMATIC = (
    'resume("latest") found nothing in %s, the directory of automatic checkpoints, so training starts from the '
    "beginning. This run names none "
    "itself: set ProjectConfiguration(automatic_checkpoint_naming=True), or give resume() the folder that save_state was given"
)

if TYPE_CHECKING:
    from headway.core.checkpoint.resume import preemption
else:
    preemption = LazyModule("headway.core.checkpoint.resume.preemption")  # needed only if the run listens for signals


class MemoryCopies(Protocol):
    """Interface of a store that keeps recent states of a run in host memory, in addition to checkpoints on a disk.

    It is implemented by `headway.extras.memory_copies`.
    """

    def finish_save(self) -> None:
        """Wait until the state that is being copied has been committed."""

    def find_newest(self) -> Path | None:
        """Return the folder of the newest state in memory, or None if there is none. Every rank must call it."""

    def is_newer(self, in_memory: Path, on_disk: Path | None) -> bool:
        """Whether a state in memory is newer than a checkpoint on the disk.

        Args:
            in_memory: Folder of the state in memory.
            on_disk: Folder of the checkpoint on the disk, or None.
        """

    def is_in_memory(self, folder: Path) -> bool:
        """Whether a folder is a checkpoint in host memory, not on a disk.

        Args:
            folder: Folder of the checkpoint.
        """


class Checkpoints:
    """Checkpoint manager of one Accelerator, which saves and resumes its run.

    Args:
        state: State of the run for its checkpoints.
        project: Project configuration: directory, naming, and number of checkpoints to keep.
        step_hooks: Hooks of the training step. They check that the run has resumed if it should, and report failed
            background saves.
        collectives: Collectives over all ranks.
        get_final_hook: Function that returns the save hook to call after those of `add_save_hook`, or None to call no
            further hook. Default: no further hook is called.
        repeats_evaluations: Whether a run resumed from a save during an evaluation repeats the evaluation from its
            start. Default: True.
        resume_method: Method of the Accelerator with which the program continues from a checkpoint: "resume" or
            "load_state". Default: "resume".

    Attributes:
        checkpoint_folder: Folder of the checkpoints, which names new ones and finds existing ones.
        hooks: Hooks of the script that run in saves and loads.
        preemption_guard: Listener for requests to stop, or None if the run does not listen for requests to stop.
        last_folder: Folder of the last checkpoint that this run saved or loaded, or None if there is none yet.
        resume_method: Method with which the program continues from a checkpoint. Messages name it.
    """

    def __init__(
        self,
        state: CheckpointState,
        project: ProjectConfiguration,
        step_hooks: StepHooks,
        collectives: Collectives,
        get_final_hook: Callable[[], SaveHook | None] = lambda: None,
        *,
        repeats_evaluations: bool = True,
        resume_method: str = "resume",
    ) -> None:
        self.checkpoint_folder = CheckpointFolder(project, state.reader)
        self.hooks = CheckpointHooks(get_final_hook)
        self.preemption_guard: preemption.PreemptionGuard | None = None
        self.last_folder: Path | None = None
        self.resume_method = resume_method
        self._repeats_evaluations = repeats_evaluations
        self._state = state
        self._step_hooks = step_hooks
        self._lock = RunLock(state.saver, state.run, self.checkpoint_folder)
        self._must_call_epochs = False
        """Whether the run was resumed, and its loop has not called `epochs` since."""
        self._last_save: tuple[Path, tuple[object, ...]] | None = None
        """Pair of (folder, position of the run) of the last save by all ranks."""
        self._has_warned_of_lone_save = False
        self._collectives = collectives
        self._memory: MemoryCopies | None = None
        if project.keep_in_memory:
            self._memory = extensions.load("feature", "keep_in_memory")(
                state, collectives, self.checkpoint_folder, step_hooks
            )
        if project.overlap_saves:
            step_hooks.before_update.append(state.saver.wait_for_copies)
            step_hooks.before_swap.append(state.saver.wait_for_copies)
            self.expect_background_saves()
        if project.automatic_checkpoint_naming:
            state.progress.expect_saves()
            step_hooks.before_learning.append(self._lock.acquire_before_training)
        if self.checkpoint_folder.conflict is not None:
            self._register_step_checks()
        add_interrupt_advice(self)
        subscribe(self._publish_commit)

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are named automatically, so that `resume("latest")` finds them."""
        return self.checkpoint_folder.is_automatic

    # ---------------------------------------------------------------- save

    def save(
        self, output_dir: str | Path | None, is_blocking: bool, metric: float | None, extra_hook: SaveHook | None = None
    ) -> Path:
        """Commit a checkpoint and return its folder. All ranks or only some of them may call it.

        If only some ranks call it, the first of them saves alone. The others return the folder without writing.

        Args:
            output_dir: Folder of the checkpoint. None: checkpoints are named automatically.
            is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
            metric: Metric of the checkpoint for `keep_best`, or None. NaN and infinity count as None.
            extra_hook: Additional save hook for this save. Default: None, no additional hook.

        Raises:
            CheckpointError: If the checkpoint, or an earlier one in the background, could not be written. Also if
                another run holds the lock, or an earlier run's checkpoint has the name of this one or a higher number.
            ConfigError: If `output_dir` is None, and checkpoints are not named automatically.
        """
        runtime = self._state.run.runtime
        checkpoint_folder = self.checkpoint_folder
        participants = runtime.scope.get_or_create(Attendance).find_participants(
            SAVE_CALL, str(checkpoint_folder.iteration)
        )
        evaluation_start = self._state.progress.find_evaluation_start() if self._repeats_evaluations else None
        if evaluation_start is not None and self._state.progress.evaluations.is_within_training_pass:
            log.warning(_WITHIN_EPOCH)
        if not participants.absence:  # all ranks take part
            return self._commit_checkpoint(output_dir, is_blocking, metric, evaluation_start, extra_hook=extra_hook)
        if participants.ranks[0] == runtime.rank:
            self._warn_of_lone_save(participants)
            return self._commit_checkpoint(
                output_dir, is_blocking, metric, evaluation_start, is_alone=True, extra_hook=extra_hook
            )
        # Only the first of the calling ranks writes. This rank may be the first process of another machine. The number of
        # the checkpoint is that of the writing rank, which might have saved alone before.
        checkpoint_folder.iteration = int(participants.note)
        folder = checkpoint_folder.get_next_folder(output_dir, is_written_here=False)
        if checkpoint_folder.is_automatic:
            checkpoint_folder.iteration += 1
        return folder

    def _warn_of_lone_save(self, participants: CallParticipants) -> None:
        """Warn once that a checkpoint lacks the RNG states of the ranks that take no part in the save.

        Args:
            participants: Ranks that save, and those that do not.
        """
        if not self._has_warned_of_lone_save:
            self._has_warned_of_lone_save = True
            log.warning(
                "save_state is called %s. The checkpoint contains everything except the RNG states%s of the other ranks, which "
                "get new ones after a resume. To keep the states of all ranks, call save_state on every rank",
                participants,
                " and the optimizer states (of local SGD)" if self._state.local.has_diverged else "",
                main_process_only=False,
            )

    def _commit_checkpoint(
        self,
        output_dir: str | Path | None,
        is_blocking: bool,
        metric: float | None,
        evaluation_start: EvaluationStart | None = None,
        is_alone: bool = False,
        extra_hook: SaveHook | None = None,
    ) -> Path:
        """Save a checkpoint and return its folder. Every rank must call it unless `is_alone` is True.

        Args:
            output_dir: Folder of the checkpoint. None: checkpoints are named automatically.
            is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
            metric: Metric of the checkpoint for `keep_best`, or None. NaN and infinity count as None.
            evaluation_start: State at the start of the evaluation in progress, at which a resumed run continues.
                Default: None, no evaluation is in progress.
            is_alone: Whether only this rank saves. Default: False.
            extra_hook: Additional save hook for this save. Default: None, no additional hook.

        Raises:
            CheckpointError: If the checkpoint, or an earlier one in the background, could not be written. Also if
                another run holds the lock, or an earlier run's checkpoint has the name of this one or a higher number.
            ConfigError: If `output_dir` is None, and checkpoints are not named automatically.
        """
        checkpoint_folder = self.checkpoint_folder
        state = self._state
        if metric is not None:  # NaN is never the best, and JSON cannot hold it
            metric = float(metric) if math.isfinite(metric) else None
        state.saver.wait(is_alone)
        self._lock.acquire(is_alone, output_dir)
        if not is_blocking:
            self._register_step_checks()
        folder = self._choose_folder(output_dir, is_alone)
        with state.run.around_save():
            collected, about = state.collector.collect(
                evaluation_start, is_alone, checkpoint_folder.project.save_frozen
            )
            about |= {"name": folder.name, "iteration": checkpoint_folder.iteration, "metric": metric}
            policy = self._make_policy(folder, collected, is_blocking, metric, is_alone)
            hooks = self.hooks.list_save_hooks(extra_hook)
            if checkpoint_folder.project.keep_compiled and not is_alone:  # a collective
                hooks.append(self._write_compiled_artifacts)
            # This runs user code, so it comes before the RNG states are read.
            position = state.progress.get_position(evaluation_start)
            state.saver.save(
                folder,
                collected,
                about,
                policy,
                make_staging_hooks(hooks, state.objects.models, collected) if hooks else (),
                lambda: state.collector.add_rng_states(collected, evaluation_start, is_alone),
            )
        self.last_folder = folder
        if checkpoint_folder.is_automatic:
            checkpoint_folder.iteration += 1
        if not is_alone:
            self._last_save = folder, position
        return folder

    def _choose_folder(self, output_dir: str | Path | None, is_alone: bool) -> Path:
        """Return the folder of the next checkpoint. Every rank must call it unless `is_alone` is True.

        All ranks get the same folder, and continue with the same checkpoint number.

        Args:
            output_dir: Folder that the caller of `save` passed. None: checkpoints are named automatically.
            is_alone: Whether only this rank saves.
        """
        checkpoint_folder = self.checkpoint_folder
        if is_alone:
            return checkpoint_folder.get_next_folder(output_dir)
        # Ranks that have saved alone have counted more checkpoints.
        checkpoint_folder.iteration = self._state.reader.find_largest(checkpoint_folder.iteration)
        folder = checkpoint_folder.get_next_folder(output_dir)
        if checkpoint_folder.is_automatic:
            return folder
        return self._state.saver.agree_on_folder(folder)

    def _make_policy(
        self, folder: Path, collected: CollectedState, is_blocking: bool, metric: float | None, is_alone: bool
    ) -> SavePolicy:
        """Return the rules for writing a checkpoint, and for deleting earlier ones.

        Args:
            folder: Folder of the checkpoint.
            collected: State to save.
            is_blocking: Whether to return only when the checkpoint is on the disk.
            metric: Finite metric of the checkpoint, or None.
            is_alone: Whether only this rank saves.
        """
        checkpoint_folder = self.checkpoint_folder
        project = checkpoint_folder.project
        state = self._state
        num_newest = project.total_limit
        protected: tuple[Path, ...] = ()
        if project.keep_best is not None or project.keep_every is not None:
            new = self._best.SavedCheckpoint(folder, metric, state.run.clock.num_updates, state.run.run_id)
            num_newest, protected = self._best.choose_retention(checkpoint_folder, new)
        deferrable_names: frozenset[str] = frozenset()
        if project.overlap_saves and not is_blocking:
            deferrable_names = frozenset(state.collector.list_step_tensors(collected))
        return SavePolicy(
            keep=num_newest if checkpoint_folder.is_automatic else None,
            protected=protected,
            owns_parent=checkpoint_folder.is_automatic,
            is_blocking=is_blocking,
            is_alone=is_alone,
            deferrable_names=deferrable_names,
        )

    def _write_compiled_artifacts(self, models: object, weights: object, staging: str) -> None:
        """Write the compiled code of all ranks into the staging directory. A save hook that every rank must call."""
        extensions.load("feature", "keep_compiled").write_artifacts(Path(staging), self._collectives)

    def wait(self) -> None:
        """Wait until a background save has finished. Every rank must call it.

        Raises:
            CheckpointError: On every rank, if the checkpoint could not be written.
        """
        self._state.saver.wait()

    def expect_background_saves(self) -> None:
        """Pin host memory for background saves before the second update, so that the first save need not wait for it.

        The size of the memory is known once the first update has created the optimizer state.
        """
        hook = self._state.saver.make_pinning_hook(self._state.objects.list_stateful)
        self._step_hooks.before_update.append(hook)

    def _publish_commit(self, event: RunEvent) -> None:
        """Report a checkpoint of this run to the launcher once it is on the disk. Do nothing for other events.

        In a background save, this can be long after `save` has returned.
        """
        if event.name == "checkpoint" and event.source is self._state.run.clock:
            publish_resume_advice(self, event.details["folder"])

    # ---------------------------------------------------------------- load

    def load(
        self,
        input_dir: str | Path | None,
        is_strict: bool,
        changed: str | Collection[str] | None = (),
        find_fallback: Callable[[], Path | None] | None = None,
    ) -> RestoreResult:
        """Load a checkpoint after `prepare`. Every rank must call it.

        If this fails before the weights are copied, all changes are undone, except those that load hooks have made.

        Args:
            input_dir: Folder of the checkpoint. None: the newest one.
            is_strict: Whether to refuse any difference from this run.
            changed: Which of "data", "schedule" and "groups" were changed on purpose. None: only warn about changed
                data and schedules. Default: (), none of them.
            find_fallback: Function that returns the checkpoint to load if the first one proves damaged. Default: None.
                The newest valid checkpoint on the disk is then loaded if `input_dir` is None, else the load fails.

        Raises:
            StateError: If other ranks continue without calling it.
            CheckpointError: If there is no checkpoint, or it is damaged or does not fit, or with `is_strict` if
                anything differs.
            ConfigError: If `changed` has an unknown name, or `input_dir` is None and checkpoints are not named
                automatically.
        """
        changed_parts = parse_changed(changed)
        participants = self._state.run.runtime.scope.get_or_create(Attendance).find_participants("load_state")
        if participants.absence:
            raise StateError(
                f"load_state is called {participants}. Each rank loads its own part of the state, and all ranks check that it fits. "
                "Call load_state on every rank, outside conditions on the rank"
            )
        self._state.saver.wait()
        if self._memory is not None:
            self._memory.finish_save()
        if find_fallback is None and not input_dir:
            find_fallback = self.checkpoint_folder.find_newest
        restored = self._load_checkpoint(
            self.checkpoint_folder.find_folder_to_load(input_dir), is_strict, changed_parts, find_fallback
        )
        folder = restored.folder
        iteration = restored.about.get("iteration")
        if self._memory is not None and self._memory.is_in_memory(folder):
            # It has the number of the next checkpoint at the time of the copy, so the last one on the disk is one lower.
            folder, iteration = self.checkpoint_folder.get_parent() / folder.name, int(iteration or 0) - 1
        else:
            publish_resume_advice(self, folder)
        self.checkpoint_folder.continue_numbering(folder, iteration)
        self.last_folder = folder
        log.info(str(restored))
        return restored

    def _load_checkpoint(
        self,
        folder: Path,
        is_strict: bool,
        changed: Collection[str] | None,
        find_fallback: Callable[[], Path | None] | None,
    ) -> RestoreResult:
        """Load a checkpoint. If it proves damaged before anything has been changed, load another one instead.

        Args:
            folder: Folder of the checkpoint.
            is_strict: Whether to refuse any difference from this run.
            changed: Which of "data", "schedule" and "groups" were changed on purpose, or None.
            find_fallback: Function that returns the folder of the checkpoint to load instead, or None if there is none.
                None: a damaged checkpoint is an error.

        Raises:
            CheckpointError: If the checkpoint does not fit, or is damaged and there is no other one.
        """
        try:
            return self._state.restorer.load(folder, is_strict, self.hooks.list_load_hooks(), changed)
        except CheckpointDamaged:
            fallback = None if find_fallback is None else find_fallback()
            if fallback is None or fallback == folder:
                raise
        return self._load_checkpoint(fallback, is_strict, changed, find_fallback)

    def resume(
        self, checkpoint: str | Path, is_strict: bool, run: str | None, changed: str | Collection[str] | None = ()
    ) -> RestoreResult | None:
        """Load a checkpoint and return a description of it. Every rank must call it.

        Return None if `checkpoint` is "latest" or "best" and there is no checkpoint.

        Args:
            checkpoint: Folder of the checkpoint, or one of the texts "latest" and "best".
            is_strict: Whether to refuse any difference from this run.
            run: ID of the run whose checkpoints count with "latest" or "best". None: the checkpoints of all runs, or
                with "best" those of this run if it has any.
            changed: Which of "data", "schedule" and "groups" were changed on purpose. None: only warn about changed
                data and schedules. Default: (), none of them.

        Raises:
            CheckpointError: If the given folder is no checkpoint, all checkpoints are damaged, or the checkpoint does
                not fit, or with `is_strict` if anything differs.
            ConfigError: If `changed` has an unknown name, the project has no directory, or "best" is used without
                `keep_best`.
            StateError: If other ranks continue without calling it.
        """
        find: Callable[[], Path | None] | None = None
        if checkpoint == "latest":  # a Path always names a folder, even Path("latest")
            find = partial(self._find_newest, run)
        elif checkpoint == "best":
            find = partial(self._find_best, run)
        folder = to_path(checkpoint).expanduser().absolute() if find is None else find()
        if folder is None:
            parent = self.checkpoint_folder.get_parent()
            if checkpoint == "best" and self._state.run.clock.num_updates:
                log.warning('resume("best") found no checkpoint in %s, and changes nothing', parent)
            elif self.checkpoint_folder.is_automatic:
                log.info("no checkpoint in %s yet: training starts from the beginning", parent)
            else:
                log.warning(_NOT_AUTOMATIC, parent)
            return None
        restored = self.load(folder, is_strict, changed, find)
        keeps_compiled = find is not None and self.checkpoint_folder.project.keep_compiled
        if keeps_compiled and extensions.load("feature", "keep_compiled").load_artifacts(restored.folder):
            log.info("compiled code was loaded from %s", restored.folder)
        self._must_call_epochs = True
        self._register_step_checks()
        return restored

    def _find_newest(self, run: str | None) -> Path | None:
        """Return the folder of the newest checkpoint, which can be in host memory or on the disk, or None.

        Args:
            run: ID of the run whose checkpoints count. None: the checkpoints of all runs.
        """
        in_memory = None if self._memory is None else self._memory.find_newest()
        try:
            on_disk = self.checkpoint_folder.find_newest(run)
        except CheckpointError:
            if in_memory is None:
                raise
            on_disk = None
        if self._memory is not None and in_memory is not None and self._memory.is_newer(in_memory, on_disk):
            return in_memory
        return on_disk

    def _find_best(self, run: str | None) -> Path | None:
        """Return the complete checkpoint with the best metric, or None. Every rank must call it.

        Args:
            run: ID of the run whose checkpoints count. None: those of all runs.
        """
        self._state.saver.wait()  # includes the checkpoint of a background save
        folder: Path | None = self._best.find_best(
            self.checkpoint_folder, self._state.reader, run, self._state.run.run_id
        )
        return folder

    @property
    def best(self) -> Path | None:
        """Folder of the checkpoint with the best metric on this rank's disk, or None if there is none.

        Checkpoints that were saved without a metric do not count.
        """
        return next(iter(self._best.list_best_first(self.checkpoint_folder, None, self._state.run.run_id)), None)

    @property
    def _best(self) -> Any:
        """Extension that ranks checkpoints by their metrics, `headway.extras.best_checkpoint`."""
        return extensions.load("feature", "best_checkpoint")

    # ---------------------------------------------------------------- epochs of the training loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs: from the current one to `num_epochs` - 1.

        End early if a prepared loader has been stopped.

        Args:
            num_epochs: Total number of epochs, which may be infinite.

        Raises:
            ConfigError: If `num_epochs` is not a whole number or infinity.
        """
        if not isinstance(num_epochs, Real) or not (math.isinf(num_epochs) or num_epochs % 1 == 0):
            raise ConfigError(f"epochs({num_epochs!r}): give the total number of epochs, a whole number")
        state = self._state
        if self._must_call_epochs and state.progress.epoch >= num_epochs:
            log.warning(_NOTHING_LEFT, state.progress.epoch, num_epochs)
        self._must_call_epochs = False
        while state.progress.epoch < num_epochs:
            state.progress.begin_epoch()
            yield state.progress.epoch
            if state.progress.is_stopped:  # in mid-epoch: a checkpoint saved now continues here
                return
            state.progress.end_epoch()

    def _register_step_checks(self) -> None:
        """Register checks that run before each training step, unless they are registered already."""
        if self._check_resumed not in self._step_hooks.before_learning:
            self._step_hooks.before_learning.append(self._check_resumed)
            self._step_hooks.before_micro_batch.append(self._check_save_and_preemption)

    def _check_resumed(self) -> None:
        """Raise an error before a training step if the run should have resumed first, or if its loop cannot resume.

        Each of the two errors is raised at most once.

        Raises:
            CheckpointError: If an earlier run's checkpoints have the names that this run will use, and this run has not
                resumed.
            StateError: If the run was resumed, but its loop over a loader does not use `epochs`.
        """
        # An evaluation can come before the loop.
        if self._must_call_epochs and not self._state.progress.is_without_loader:
            self._must_call_epochs = False
            raise StateError(
                f"this run was resumed in epoch {self._state.progress.epoch}, but the loop starts at epoch 0. Write `for epoch in "
                "accelerator.epochs(num_epochs):` in place of `for epoch in range(num_epochs):`"
            )
        self.checkpoint_folder.ensure_resumed()

    def _check_save_and_preemption(self) -> None:
        """Raise the error of a failed background save. In loops without prepared loaders, also check for preemption."""
        self._state.saver.raise_background_error()
        if self.preemption_guard is not None and self._state.progress.is_without_loader:
            self.preemption_guard.check()

    # ---------------------------------------------------------------- preemption

    @property
    def is_preempted(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.preemption_guard is not None and self.preemption_guard.is_preempted

    def check_preemption(self) -> bool:
        """Save and end the run if all ranks have agreed to stop, and return whether they have agreed.

        With `Preemption(exits=False)`, the run is neither saved nor ended here. If the run does not listen for requests
        to stop, return False.

        Raises:
            Preempted: After the save, which ends the process with code 75.
            CheckpointError: If the checkpoint could not be saved.
        """
        if self.preemption_guard is not None:
            self.preemption_guard.check()
        return self.is_preempted

    def start_listening(self, settings: Preemption | None, is_requested: bool) -> None:
        """Start listening for requests to stop the run.

        Args:
            settings: Signals and deadlines that ask the run to stop. None: do not listen.
            is_requested: Whether the user has requested this explicitly. False: outside the main thread, where signals
                cannot be handled, do nothing instead of raising an error.

        Raises:
            StateError: If `is_requested` is True, and this is not the main thread.
        """
        if settings is None or (not is_requested and threading.current_thread() is not threading.main_thread()):
            return
        self.preemption_guard = preemption.PreemptionGuard(settings, self._state, self._save_before_exit)
        self._state.progress.expect_saves()
        self._state.progress.set_preemption_check(self.preemption_guard.check)
        self._register_step_checks()

    def stop_watching(self) -> None:
        """Stop listening for signals and deadlines, and release the lock of the checkpoints' folder.

        First wait for the state that is being copied to host memory, if there is one. The next training step or save
        locks the folder again.
        """
        if self._memory is not None:
            self._memory.finish_save()
        if self.preemption_guard is not None:
            self.preemption_guard.stop()
            self._state.progress.set_preemption_check(None)
        self._lock.release()

    def start_watching(self) -> None:
        """Listen again for requests to stop the run, and replace any other listener.

        Do nothing if `start_listening` has not started a listener. Outside the main thread, only log a message.
        """
        if self.preemption_guard is None:
            return
        if threading.current_thread() is not threading.main_thread():
            log.info(
                "signals that ask the run to end have no effect, because the Accelerator was not created in the main thread"
            )
            return
        self.preemption_guard.start()
        self._state.progress.set_preemption_check(self.preemption_guard.check)

    def _save_before_exit(self, evaluation_start: EvaluationStart | None) -> Path:
        """Return the folder of a checkpoint with the run's current position, for a run that is about to exit.

        Every rank must call it. The last checkpoint is reused if it has this position and the run has no registered
        objects. Otherwise a new one is saved.

        Args:
            evaluation_start: State at the start of the evaluation in progress, or None.
        """
        state = self._state
        folder, position = self._last_save or (None, None)
        try:
            state.saver.wait()
            # A later save by a single rank might have removed the folder.
            is_current = (
                folder is not None
                and position == state.progress.get_position(evaluation_start)
                and not state.run.custom
                and (folder / MANIFEST).is_file()
            )
            if state.saver.is_true_on_all_ranks(is_current) and folder is not None:
                return folder
        except CheckpointError as error:
            log.warning("%s; another one is saved now", error)
        return self._commit_checkpoint(None, True, None, evaluation_start)

    # ---------------------------------------------------------------- registered objects

    def register(self, objects: tuple[Any, ...]) -> None:
        """Register objects whose state is saved and loaded, in addition to the prepared objects.

        An object that is already registered is not added again.

        Args:
            objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: If an object lacks one of these methods. The message names the types of all such objects.
        """
        unfit = [
            type(obj).__name__
            for obj in objects
            if not (callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)))
        ]
        if unfit:
            raise ConfigError(
                f"register_for_checkpointing got {', '.join(unfit)} without state_dict and load_state_dict"
            )
        objects_by_id = {id(obj): obj for obj in (*self._state.run.custom, *objects)}
        self._state.run.custom[:] = objects_by_id.values()  # in place, because others hold this list
