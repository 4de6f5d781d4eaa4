"""Save and resume a run: the implementation of `save_state`, `load_state`, `resume` and `epochs`.

Arguments that Accelerate's `save_state` and `load_state` pass on to DeepSpeed and other backends are accepted and
ignored.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from headway.common.object_path import to_path
from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.checkpoint.folders import find_store
from headway.core.checkpoint.format.manifest import MANIFEST
from headway.core.checkpoint.resume.after_interrupt import explain_interrupts, publish_checkpoint
from headway.core.checkpoint.resume.comparison import RestoreResult
from headway.core.checkpoint.resume.positions import EvaluationStart
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.checkpoint.saving.place import CheckpointFolder
from headway.core.checkpoint.saving.writer import SavePolicy
from headway.core.checkpoint.state import CollectedState
from headway.core.config.preemption import Preemption
from headway.core.config.run import ProjectConfiguration
from headway.core.config.values import suggest_word
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.control_plane.attendance import SAVE, Attendance, CallParticipants
from headway.core.runtime.device import is_device_type
from headway.core.runtime.events import RunEvent, subscribe
from headway.core.training.hooks import StepHooks
from headway.errors import CheckpointDamaged, CheckpointError, ConfigError, StateError
from headway.log import get_logger

log = get_logger(__name__)

CHANGED = ("data", "schedule", "groups")
"""Allowed values of the argument `changed`: parts of a run that may differ on purpose from the saved run."""
_ARGUMENTS = {
    "save_state": (
        "output_dir safe_serialization blocking metric weights",
        "client_state exclude_frozen_parameters max_shard_size save_function tag save_latest",
        "the checkpoint holds the whole state",
    ),
    "load_state": (
        "input_dir load_kwargs map_location strict changed",
        "load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only tag custom_load_fn mmap weights_only",
        "the whole state is loaded",
    ),
}
"""For each method of the Accelerator, a triple of texts about its arguments.

The first text lists the method's own arguments. The second lists the arguments of other backends that the method
ignores. The third is the end of the message about an ignored argument.
"""
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


SaveHook = Callable[[list[torch.nn.Module], list[dict[str, torch.Tensor]], str], None]
LoadHook = Callable[[list[torch.nn.Module], str], None]


class MemoryCopies(Protocol):
    """Interface of a store that keeps recent states of a run in host memory, in addition to checkpoints on a disk.

    It is implemented by `headway.extras.memory_copies`.
    """

    def finish_save(self) -> None:
        """Wait until the state that is being copied has been committed."""

    def find_newest(self) -> Path | None:
        """Return the folder of the newest state in memory, or None if there is none. Every rank must call it."""

    def is_newer(self, kept: Path, on_disk: Path | None) -> bool:
        """Whether a state in memory is newer than a checkpoint on the disk.

        Args:
            kept: Folder of the state in memory.
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
        last_hook: Function that returns the save hook to call after those of `add_save_hook`, or None to call no
            further hook. Default: no further hook is called.
        repeats_evaluations: Whether a run resumed from a save during an evaluation repeats the evaluation from its
            start. Default: True.
        resume_method: Method of the Accelerator with which the program continues from a checkpoint: "resume" or
            "load_state". Default: "resume".

    Attributes:
        place: Folder of the checkpoints.
        guard: Preemption guard, or None if the run does not listen for requests to stop.
        last_folder: Folder of the last checkpoint that this run saved or loaded, or None if there is none yet.
        resume_method: Method with which the program continues from a checkpoint. Messages name it.
    """

    def __init__(
        self,
        state: CheckpointState,
        project: ProjectConfiguration,
        step_hooks: StepHooks,
        collectives: Collectives,
        last_hook: Callable[[], SaveHook | None] = lambda: None,
        *,
        repeats_evaluations: bool = True,
        resume_method: str = "resume",
    ) -> None:
        self.place = CheckpointFolder(project, state.reader)
        self.guard: preemption.PreemptionGuard | None = None
        self.last_folder: Path | None = None
        self.resume_method = resume_method
        self._repeats_evaluations = repeats_evaluations
        self._state = state
        self._step_hooks = step_hooks
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._last_hook = last_hook
        self._owes_epochs = False
        self._last: tuple[Path, tuple[object, ...]] | None = None
        self._has_told_alone = False
        self._held: Path | None = None
        self._collectives = collectives
        self._memory: MemoryCopies | None = None
        if project.keep_in_memory:
            self._memory = extensions.load("feature", "keep_in_memory")(state, collectives, self.place, step_hooks)
        if project.overlap_saves:
            step_hooks.before_update.append(state.saver.wait_for_copies)
            step_hooks.before_swap.append(state.saver.wait_for_copies)
            self.expect_background_saves()
        if project.automatic_checkpoint_naming:
            state.progress.expect_saves()
            step_hooks.before_learning.append(self._hold_at_first)
        if self.place.earlier is not None:
            self._check_steps()
        explain_interrupts(self)
        subscribe(self._publish_commit)

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are named automatically, so that `resume("latest")` finds them."""
        return self.place.is_automatic

    def _publish_commit(self, event: RunEvent) -> None:
        """Report a checkpoint of this run to the launcher once it is on the disk. Do nothing for other events.

        In a background save, this can be long after `save` has returned.
        """
        if event.name == "checkpoint" and event.source is self._state.run.clock:
            publish_checkpoint(self, event.details["folder"])

    def expect_background_saves(self) -> None:
        """Pin host memory for background saves before the second update, so that the first save need not wait for it.

        The size of the memory is known once the first update has created the optimizer state.
        """
        self._step_hooks.before_update.append(self._state.saver.pin_early(self._state.objects.list_stateful))

    def _hold_at_first(self) -> None:
        """Lock the checkpoints' folder before the first training step, to find a conflict with another run early."""
        if self._held is None:
            self._lock_folder()

    def _lock_folder(self, is_alone: bool = False, output_dir: str | Path | None = None) -> None:
        """Lock the folder into which this run saves. Runs that only read checkpoints never lock it.

        Automatically named checkpoints lock their parent folder. A folder that the caller names is locked only if its
        store needs a lock, which a disk does not. Every rank must call this method unless `is_alone` is True.

        Args:
            is_alone: Whether only this rank saves. Default: False.
            output_dir: Folder of the checkpoint. Default: None, checkpoints are named automatically.

        Raises:
            CheckpointError: If another run holds the lock.
        """
        place = self.place
        state = self._state
        folder = None if place.is_automatic or output_dir is None else place.folder_for(output_dir)
        if place.is_automatic and place.project.project_dir is not None:
            self._held = place.parent()
        elif folder is not None and find_store(folder).needs_lock:
            if self._held not in (None, folder):
                self.release_lock()
            self._held = folder
        else:
            return
        state.run.run_id = state.saver.lock_folder(self._held, state.run.run_id, is_alone)

    def release_lock(self) -> None:
        """Release the lock of the checkpoints' folder if this run holds it."""
        if self._held is not None:
            self._state.saver.release_lock(self._held)
            self._held = None

    def _check_steps(self) -> None:
        """Register checks that run before each training step, unless they are registered already."""
        if self._check_resumed not in self._step_hooks.before_learning:
            self._step_hooks.before_learning.append(self._check_resumed)
            self._step_hooks.before_micro_batch.append(self._check_place)

    # ---------------------------------------------------------------- save

    def save(
        self, output_dir: str | Path | None, is_blocking: bool, metric: float | None, also: SaveHook | None = None
    ) -> Path:
        """Commit a checkpoint and return its folder. All ranks or only some of them may call it.

        If only some ranks call it, the first of them saves alone. The others return the folder without writing.

        Args:
            output_dir: Folder of the checkpoint. None: checkpoints are named automatically.
            is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
            metric: Metric of the checkpoint for `keep_best`, or None. NaN and infinity count as None.
            also: Additional save hook for this save. Default: None, no additional hook.

        Raises:
            CheckpointError: If the checkpoint, or an earlier one in the background, could not be written, another run
                holds the lock, or an earlier run's checkpoint has the name.
            ConfigError: If `output_dir` is None, and checkpoints are not named automatically.
        """
        runtime = self._state.run.runtime
        place = self.place
        attended = runtime.scope.get_or_create(Attendance).find_participants(SAVE, str(place.iteration))
        before = self._state.progress.find_evaluation_start() if self._repeats_evaluations else None
        if before is not None and self._state.progress.evaluations.is_within_epoch:
            log.warning(_WITHIN_EPOCH)
        if not attended.elsewhere:
            return self._commit_checkpoint(output_dir, is_blocking, metric, before, also=also)
        if attended.ranks[0] == runtime.rank:
            self._tell_alone(attended)
            return self._commit_checkpoint(output_dir, is_blocking, metric, before, is_alone=True, also=also)
        # Only the first of the calling ranks writes. This rank may be the first process of another machine. The number of
        # the checkpoint is that of the writing rank, which might have saved alone before.
        place.iteration = int(attended.note)
        folder = place.folder_for(output_dir, is_written_here=False)
        place.iteration += place.is_automatic
        return folder

    def _tell_alone(self, attended: CallParticipants) -> None:
        if not self._has_told_alone:
            self._has_told_alone = True
            log.warning(
                "save_state is called %s. The checkpoint contains everything except the RNG states%s of the other ranks, which "
                "get new ones after a resume. To keep the states of all ranks, call save_state on every rank",
                attended,
                " and the optimizer states (of local SGD)" if self._state.local.has_diverged else "",
                main_process_only=False,
            )

    def _commit_checkpoint(
        self,
        output_dir: str | Path | None,
        is_blocking: bool,
        metric: float | None,
        before: EvaluationStart | None = None,
        is_alone: bool = False,
        also: SaveHook | None = None,
    ) -> Path:
        place = self.place
        state = self._state
        if metric is not None:  # NaN is never the best, and JSON cannot hold it
            metric = float(metric) if math.isfinite(metric) else None
        state.saver.wait(is_alone)
        self._lock_folder(is_alone, output_dir)
        if not is_blocking:
            self._check_steps()
        if not is_alone:  # ranks that have saved alone have counted more checkpoints
            place.iteration = state.reader.find_largest(place.iteration)
        folder = place.folder_for(output_dir)
        if not is_alone and not place.is_automatic:
            folder = state.saver.agree_on(folder)
        with state.run.around_save():
            collected, about = state.collector.collect(before, is_alone, place.project.save_frozen)
            about |= {"name": folder.name, "iteration": place.iteration, "metric": metric}
            is_overlapped = place.project.overlap_saves and not is_blocking
            steady = state.collector.list_steady(collected) if is_overlapped else ()
            policy = SavePolicy(
                place.project.total_limit if place.is_automatic else None,
                self._best.find_kept(place, folder, metric, state.run.run_id) if place.project.keep_best else (),
                place.is_automatic,
                is_blocking,
                is_alone=is_alone,
                steady=frozenset(steady),
            )
            hooks = [each for each in (*self._save_hooks.values(), also, self._last_hook()) if each is not None]
            if place.project.keep_compiled and not is_alone:
                hooks.append(
                    lambda models, weights, staging: extensions.load("feature", "keep_compiled").write_artifacts(
                        Path(staging), self._collectives
                    )
                )
            fills = self._make_fills(hooks, collected) if hooks else ()
            where = state.progress.get_position(before)  # runs user code, so it comes before the RNG states are read
            state.saver.save(
                folder,
                collected,
                about,
                policy,
                fills,
                lambda: state.collector.add_rng_states(collected, before, is_alone),
            )
        self.last_folder = folder
        place.iteration += place.is_automatic
        if not is_alone:
            self._last = folder, where
        return folder

    def _make_fills(self, hooks: Sequence[SaveHook], collected: CollectedState) -> list[Callable[[Path], None]]:
        """Return functions that call each save hook, and at the end remove the weights that hooks have saved themselves.

        Args:
            hooks: Save hooks.
            collected: State of the save, from which weights are removed.
        """
        models = self._state.objects.models
        weights = [
            {
                name.split("/", 2)[2]: tensor
                for name, tensor in collected.tensors.items()
                if name.startswith(f"model/{index}/")
            }
            for index in range(len(models))
        ]
        before = list(weights)

        def call_hook(hook: SaveHook, staging: Path) -> None:
            hook(models, weights, str(staging))

        def remove_saved_weights(staging: Path) -> None:
            for index, own in enumerate(before):
                if not any(own is each for each in weights):
                    for name in own:
                        del collected.tensors[f"model/{index}/{name}"]
                    for name in [each for each in collected.aliases if each.startswith(f"model/{index}/")]:
                        del collected.aliases[name]

        return [*(partial(call_hook, hook) for hook in hooks), remove_saved_weights]

    def wait(self) -> None:
        """Wait until a background save has finished. Every rank must call it.

        Raises:
            CheckpointError: On every rank, if the checkpoint could not be written.
        """
        self._state.saver.wait()

    # ---------------------------------------------------------------- preemption

    @property
    def is_preempted(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.guard is not None and self.guard.is_preempted

    def check_preemption(self) -> bool:
        """Save and end the run if all ranks have agreed to stop.

        Return whether they have agreed. With `Preemption(exits=False)`, the run is neither saved nor ended here. If the
        run does not listen for requests to stop, return False.

        Raises:
            Preempted: After the save, which ends the process with code 75.
            CheckpointError: If the checkpoint could not be saved.
        """
        if self.guard is not None:
            self.guard.check()
        return self.is_preempted

    def start_listening(self, settings: Preemption | None, is_asked_for: bool) -> None:
        """Start listening for requests to stop the run.

        Args:
            settings: Signals and deadlines that ask the run to stop. None: do not listen.
            is_asked_for: Whether the user has requested this explicitly. False: outside the main thread, where signals
                cannot be handled, do nothing instead of raising an error.

        Raises:
            StateError: If `is_asked_for` is True, and this is not the main thread.
        """
        if settings is None or (not is_asked_for and threading.current_thread() is not threading.main_thread()):
            return
        self.guard = preemption.PreemptionGuard(settings, self._state, self._save_to_end)
        self._state.progress.expect_saves()
        self._state.progress.ask_before_batches(self.guard.check)
        self._check_steps()

    def stop_watching(self) -> None:
        """Stop listening for signals and deadlines, and release the lock of the checkpoints' folder.

        The next training step or save locks the folder again.
        """
        if self._memory is not None:
            self._memory.finish_save()
        if self.guard is not None:
            self.guard.stop()
            self._state.progress.ask_before_batches(None)
        self.release_lock()

    def start_watching(self) -> None:
        """Listen again for requests to stop the run, and replace any other listener.

        Do nothing if `start_listening` has not started a listener. Outside the main thread, only log a message.
        """
        if self.guard is None:
            return
        if threading.current_thread() is not threading.main_thread():
            log.info(
                "signals that ask the run to end have no effect, because the Accelerator was not created in the main thread"
            )
            return
        self.guard.start()
        self._state.progress.ask_before_batches(self.guard.check)

    def _check_place(self) -> None:
        """Raise the error of a failed background save. In loops without prepared loaders, also check for preemption."""
        self._state.saver.raise_background_error()
        if self.guard is not None and self._state.progress.is_without_loader:
            self.guard.check()

    def _save_to_end(self, before: EvaluationStart | None) -> Path:
        """Return the folder of a checkpoint with the run's current position, for a run that is about to exit.

        Every rank must call it. The last checkpoint is reused if it has this position and the run has no registered
        objects. Otherwise a new one is saved.

        Args:
            before: State at the start of the evaluation in progress, or None.
        """
        state = self._state
        folder, where = self._last or (None, None)
        try:
            state.saver.wait()
            # A later save by a single rank might have removed the folder.
            is_here = (
                folder is not None
                and where == state.progress.get_position(before)
                and not state.run.custom
                and (folder / MANIFEST).is_file()
            )
            if state.saver.is_agreed(is_here) and folder is not None:
                return folder
        except CheckpointError as error:
            log.warning("%s; another one is saved now", error)
        return self._commit_checkpoint(None, True, None, before)

    # ---------------------------------------------------------------- hooks and objects

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook that each save calls before any file of the checkpoint is written, on every rank that saves.

        Args:
            hook: Function of the models, their state dicts, and the staging directory. The weights of a model whose
                state dict it removes from the list are not saved.

        Returns:
            Handle that removes the hook.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook that each load calls, and return a handle that removes it.

        Args:
            hook: Function of the models and the checkpoint's folder. A model that it removes from the list is not
                loaded.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

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
        self._state.run.custom[:] = {id(obj): obj for obj in (*self._state.run.custom, *objects)}.values()

    # ---------------------------------------------------------------- load

    def list_models_to_load(self, folder: Path) -> list[torch.nn.Module]:
        """Call the load hooks with another program's checkpoint, and return the models that are still to be loaded.

        Each hook gets the list of models, and removes the models that it has loaded.

        Args:
            folder: Folder of the checkpoint.
        """
        models = self._state.objects.models
        for hook in self._load_hooks.values():
            hook(models, str(folder))
        return models

    def load(
        self,
        input_dir: str | Path | None,
        is_strict: bool,
        changed: str | Collection[str] | None = (),
        newest: Callable[[], Path | None] | None = None,
    ) -> RestoreResult:
        """Load a checkpoint after `prepare`. Every rank must call it.

        If this fails before the weights are copied, all changes are undone, except those that load hooks have made.

        Args:
            input_dir: Folder of the checkpoint. None: the newest one.
            is_strict: Whether to refuse any difference from this run.
            changed: Which of "data", "schedule" and "groups" were changed on purpose. None: only warn about changed
                data and schedules. Default: (), none of them.
            newest: Function that returns the checkpoint to load if the first one proves damaged. Default: None. The
                newest valid checkpoint on the disk is then loaded if `input_dir` is None, else the load fails.

        Raises:
            StateError: If other ranks continue without calling it.
            CheckpointError: If there is no checkpoint, or it is damaged or does not fit, or with `is_strict` if
                anything differs.
            ConfigError: If `changed` has an unknown name, or `input_dir` is None and checkpoints are not named
                automatically.
        """
        meant = check_changed(changed)
        attended = self._state.run.runtime.scope.get_or_create(Attendance).find_participants("load_state")
        if attended.elsewhere:
            raise StateError(
                f"load_state is called {attended}. Each rank loads its own part of the state, and all ranks check that it fits. "
                "Call load_state on every rank, outside conditions on the rank"
            )
        self._state.saver.wait()
        if self._memory is not None:
            self._memory.finish_save()
        restored = self._load_checkpoint(
            self.place.to_load(input_dir), is_strict, meant, newest or (None if input_dir else self.place.find_newest)
        )
        folder = restored.folder
        iteration = restored.about.get("iteration")
        # A state in memory was copied before the checkpoint with that number was saved.
        if self._memory is not None and self._memory.is_in_memory(folder):
            folder, iteration = self.place.parent() / folder.name, int(iteration or 0) - 1
        else:
            publish_checkpoint(self, folder)
        self.place.go_on_from(folder, iteration)
        self.last_folder = folder
        log.info(str(restored))
        return restored

    def _load_checkpoint(
        self, folder: Path, is_strict: bool, changed: Collection[str] | None, newest: Callable[[], Path | None] | None
    ) -> RestoreResult:
        """Load a checkpoint.

        If it proves damaged before anything has been changed, load the checkpoint that `newest` returns instead.

        Args:
            folder: Folder of the checkpoint.
            is_strict: Whether to refuse any difference from this run.
            changed: Which of "data", "schedule" and "groups" were changed on purpose, or None.
            newest: Function that returns the folder of another checkpoint, or None if there is none. None: a damaged
                checkpoint is an error.

        Raises:
            CheckpointError: If the checkpoint does not fit, or is damaged and `newest` finds no other one.
        """
        try:
            return self._state.restorer.load(folder, is_strict, tuple(self._load_hooks.values()), changed)
        except CheckpointDamaged:
            older = None if newest is None else newest()
            if older in (None, folder):
                raise
        return self._load_checkpoint(older, is_strict, changed, newest)

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
        # A Path always names a folder, even Path("latest").
        find = {"latest": self._find_newest, "best": self._find_best}.get(
            checkpoint if isinstance(checkpoint, str) else ""
        )
        folder = to_path(checkpoint).expanduser().absolute() if find is None else find(run)
        if folder is None:
            if find == self._find_best and self._state.run.clock.num_updates:
                log.warning('resume("best") found no checkpoint in %s, and changes nothing', self.place.parent())
            elif self.place.is_automatic:
                log.info("no checkpoint in %s yet: training starts from the beginning", self.place.parent())
            else:
                log.warning(_NOT_AUTOMATIC, self.place.parent())
            return None
        restored = self.load(folder, is_strict, changed, None if find is None else partial(find, run))
        keeps_compiled = find is not None and self.place.project.keep_compiled
        if keeps_compiled and extensions.load("feature", "keep_compiled").load_artifacts(restored.folder):
            log.info("compiled code was loaded from %s", restored.folder)
        self._owes_epochs = True
        self._check_steps()
        return restored

    @property
    def _best(self) -> Any:
        """Extension that ranks checkpoints by their metrics, `headway.extras.best_checkpoint`."""
        return extensions.load("feature", "best_checkpoint")

    @property
    def best(self) -> Path | None:
        """Folder of the checkpoint with the best metric on this rank's disk, or None if there is none.

        Checkpoints that were saved without a metric do not count.
        """
        return next(iter(self._best.list_best_first(self.place, None, self._state.run.run_id)), None)

    def _find_best(self, run: str | None) -> Path | None:
        self._state.saver.wait()  # includes the checkpoint of a background save
        found: Path | None = self._best.find_best(self.place, self._state.reader, run, self._state.run.run_id)
        return found

    def _find_newest(self, run: str | None) -> Path | None:
        """Return the folder of the newest checkpoint, which can be in host memory or on the disk, or None.

        Args:
            run: ID of the run whose checkpoints count. None: the checkpoints of all runs.
        """
        kept = None if self._memory is None else self._memory.find_newest()
        try:
            folder = self.place.find_newest(run)
        except CheckpointError:
            if kept is None:
                raise
            folder = None
        return kept if kept is not None and self._memory and self._memory.is_newer(kept, folder) else folder

    # ---------------------------------------------------------------- epochs

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
        if self._owes_epochs and state.progress.epoch >= num_epochs:
            log.warning(_NOTHING_LEFT, state.progress.epoch, num_epochs)
        self._owes_epochs = False
        while state.progress.epoch < num_epochs:
            state.progress.begin_epoch()
            yield state.progress.epoch
            if state.progress.is_stopped:  # in mid-epoch: a checkpoint saved now continues here
                return
            state.progress.end_epoch()

    def _check_resumed(self) -> None:
        """Raise an error before a training step if the run should have resumed first, or if its loop cannot resume.

        Each of the two errors is raised at most once.

        Raises:
            CheckpointError: If an earlier run's checkpoints have the names that this run will use, and this run has not
                resumed.
            StateError: If the run was resumed, but its loop over a loader does not use `epochs`.
        """
        # An evaluation can come before the loop.
        if self._owes_epochs and not self._state.progress.is_without_loader:
            self._owes_epochs = False
            raise StateError(
                f"this run was resumed in epoch {self._state.progress.epoch}, but the loop starts at epoch 0. Write `for epoch in "
                "accelerator.epochs(num_epochs):` in place of `for epoch in range(num_epochs):`"
            )
        self.place.check_resumed()


# -------------------------------------------------------------------- arguments


def check_save_arguments(given: Mapping[str, Any]) -> None:
    """Log that extra arguments of `save_state` belong to other backends and have no effect.

    Args:
        given: Extra arguments by name.

    Raises:
        ConfigError: If no supported backend has an argument of this name.
    """
    for name in given:
        _check_argument_name("save_state", name)


def check_load_arguments(given: Mapping[str, Any]) -> None:
    """Log that extra arguments of `load_state` belong to other backends and have no effect.

    `map_location` has no effect either, but nothing is logged for it.

    Args:
        given: Extra arguments by name.

    Raises:
        ConfigError: If no supported backend has an argument of this name, or `map_location` is not None, "cpu",
            "on_device" or a device.
    """
    for name, value in given.items():
        if name != "map_location":
            _check_argument_name("load_state", name)
        elif value is not None and not _is_place(value if isinstance(value, str) else str(value)):
            raise ConfigError(
                f"load_state(map_location={value!r}); allowed: None, 'cpu', 'on_device' or a device. With any of them, "
                "each state goes to the device of its prepared object"
            )


def check_changed(given: str | Collection[str] | None) -> Collection[str] | None:
    """Return the argument `changed` as a collection of names, or None.

    Args:
        given: One or several of "data", "schedule" and "groups", or None.

    Raises:
        ConfigError: If another name is given.
    """
    meant = (given,) if isinstance(given, str) else given
    for name in meant or ():
        if name not in CHANGED:
            raise ConfigError(f"changed={given!r}; allowed: {', '.join(map(repr, CHANGED))}, or several of them")
    return meant


def _is_place(place: str) -> bool:
    kind, colon, number = place.partition(":")
    return place in ("cpu", "on_device") or (is_device_type(kind) and (not colon or number.isdigit()))


def _check_argument_name(method: str, name: str) -> None:
    own, known, always = _ARGUMENTS[method]
    if name not in known.split():
        allowed = [*own.split(), *known.split()]
        hint = suggest_word(name, allowed)
        raise ConfigError(f"{method}() has no argument {name!r}{hint or '; allowed: ' + ', '.join(allowed)}")
    log.info_once("%s(%s=...) has no effect: it is for an engine that is not in use; %s", method, name, always)
