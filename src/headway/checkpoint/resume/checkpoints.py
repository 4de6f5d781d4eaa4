"""Saving and resuming a run: what is behind `save_state`, `load_state`, `resume` and `epochs`.

Arguments that Accelerate's `save_state` and `load_state` pass on to engines are accepted without effect.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from headway.checkpoint.folders import store_of
from headway.checkpoint.format.manifest import MANIFEST
from headway.checkpoint.resume.comparison import Restored
from headway.checkpoint.resume.positions import EvaluationStart
from headway.checkpoint.resume.run import RunState
from headway.checkpoint.saving.place import CheckpointFolder
from headway.checkpoint.saving.writer import SavePolicy
from headway.checkpoint.state import CollectedState
from headway.common.object_path import to_path
from headway.common.optional import Later
from headway.config.run import Preemption, ProjectConfiguration
from headway.config.values import did_you_mean
from headway.errors import CheckpointDamaged, CheckpointError, ConfigError, StateError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.control_plane.attendance import SAVE, Attendance, Attended
from headway.runtime.device import is_kind
from headway.training.hooks import StepHooks

log = get_logger(__name__)

CHANGED = ("data", "schedule")
"""What a run that is resumed may have others of, where it says so."""
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
"""By method: its own arguments, those of engines, and what happens whatever these say."""
_NOTHING_LEFT = (
    "nothing is left to train: resumed after %d of %d epochs; train for more epochs, or start again in another folder"
)
_NOT_AUTOMATIC = (
    'resume("latest") found nothing in %s, the place of automatic checkpoints: training begins at the start. This run names none '
    "itself: set ProjectConfiguration(automatic_checkpoint_naming=True), or give resume() the folder that save_state was given"
)

if TYPE_CHECKING:
    from headway.checkpoint.resume import compiled, memory, preemption
else:
    compiled = Later("headway.checkpoint.resume.compiled")
    memory = Later("headway.checkpoint.resume.memory")
    preemption = Later("headway.checkpoint.resume.preemption")  # needed only where somebody listens for signals


SaveHook = Callable[[list[torch.nn.Module], list[dict[str, torch.Tensor]], str], None]
LoadHook = Callable[[list[torch.nn.Module], str], None]


class Checkpoints:
    """Saves one Accelerator's run, and takes it up again.

    Args:
        run_state: what is saved.
        project: where, and how many.
        moments: of the training step, some of which are checks' of what is saved or resumed.
        collectives: among all ranks.
        last_hook: gives a hook that is called after all those of `add_save_hook`; None: there is none.

    Attributes:
        place: where the checkpoints lie.
        guard: answers who asks the run to end; None where nobody listens.
    """

    def __init__(
        self,
        run_state: RunState,
        project: ProjectConfiguration,
        moments: StepHooks,
        collectives: Collectives,
        last_hook: Callable[[], SaveHook | None] = lambda: None,
    ) -> None:
        self.place = CheckpointFolder(project, run_state.reader)
        self.guard: preemption.PreemptionGuard | None = None
        self._run = run_state
        self._moments = moments
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._last_hook = last_hook
        self._owes_epochs = False
        self._last: tuple[Path, tuple[object, ...]] | None = None
        self._has_told_alone = False
        self._held: Path | None = None
        self._collectives = collectives
        self._memory: memory.MemoryTier | None = None
        if project.keep_in_memory:
            self._memory = memory.MemoryTier(run_state, collectives, self.place, moments)
        if project.overlap_saves:
            moments.before_update.append(run_state.saver.settle)
        if project.automatic_checkpoint_naming:
            run_state.expect_saves()
            moments.before_learning.append(self._hold_at_first)
        if self.place.earlier is not None:
            self._check_steps()

    def _hold_at_first(self) -> None:
        """Something is about to learn: has another run the checkpoints' folder?"""
        if self._held is None:
            self._hold()

    def _hold(self, is_alone: bool = False, output_dir: str | Path | None = None) -> None:
        """Let no other run save where this one does; who only reads holds nothing."""
        place, run = self.place, self._run
        folder = None if place.is_automatic or output_dir is None else place.folder_for(output_dir)
        if place.is_automatic and place.project.project_dir is not None:
            self._held = place.parent()
        elif folder is not None and store_of(folder).needs_lock:
            if self._held not in (None, folder):
                self.let_go()
            self._held = folder
        else:
            return
        run.run_id = run.saver.hold(self._held, run.run_id, is_alone)

    def let_go(self) -> None:
        """Leave the place to others."""
        if self._held is not None:
            self._run.saver.let_go(self._held)
            self._held = None

    def _check_steps(self) -> None:
        """From now on there may be something to check where something is about to learn."""
        if self._check_resumed not in self._moments.before_learning:
            self._moments.before_learning.append(self._check_resumed)
            self._moments.before_begin.append(self._check_place)

    # ---------------------------------------------------------------- save

    def save(
        self, output_dir: str | Path | None, is_blocking: bool, metric: float | None, also: SaveHook | None = None
    ) -> Path:
        """Commit a checkpoint, on all ranks or on the one that was let pass, with what `also` writes; returns its folder."""
        runtime = self._run.runtime
        attended = runtime.scope.own(Attendance).who_comes(SAVE)
        if not attended.elsewhere:
            return self._commit(output_dir, is_blocking, metric, also=also)
        if attended.ranks[0] == runtime.rank:
            self._tell_alone(attended)
            return self._commit(output_dir, is_blocking, metric, is_alone=True, also=also)
        # Such as the first process of another machine: the first of those that came writes.
        folder = self.place.folder_for(output_dir)
        self.place.iteration += self.place.is_automatic
        return folder

    def _tell_alone(self, attended: Attended) -> None:
        if not self._has_told_alone:
            self._has_told_alone = True
            log.warning(
                "save_state is called %s. The checkpoint holds everything but the RNG states%s of the other ranks, which get "
                "new ones after a resume. To keep theirs too, call it on every rank",
                attended,
                " and the optimizer states (of local SGD)" if self._run.local.has_parted else "",
                main_process_only=False,
            )

    def _commit(
        self,
        output_dir: str | Path | None,
        is_blocking: bool,
        metric: float | None,
        before: EvaluationStart | None = None,
        is_alone: bool = False,
        also: SaveHook | None = None,
    ) -> Path:
        run, place = self._run, self.place
        if metric is not None:  # nan is never the best, and JSON has none
            metric = float(metric) if math.isfinite(metric) else None
        run.saver.wait(is_alone)
        self._hold(is_alone, output_dir)
        if not is_blocking:
            self._check_steps()
        if not is_alone:  # some ranks may have saved without the others
            place.iteration = run.reader.largest(place.iteration)
        folder = place.folder_for(output_dir)
        if not is_alone and not place.is_automatic:
            folder = run.saver.agree_on(folder)
        collected, about = run.collect(before, is_alone, place.project.save_frozen)
        about |= {"name": folder.name, "iteration": place.iteration, "metric": metric}
        policy = SavePolicy(
            place.project.total_limit if place.is_automatic else None,
            place.best(folder, metric, run.run_id),
            place.is_automatic,
            is_blocking,
            is_alone=is_alone,
            steady=frozenset(run.steady(collected)) if place.project.overlap_saves and not is_blocking else frozenset(),
        )
        hooks = [each for each in (*self._save_hooks.values(), also, self._last_hook()) if each is not None]
        if place.project.keep_compiled and not is_alone:
            hooks.append(lambda models, weights, staging: compiled.write(Path(staging), self._collectives))
        fill = (lambda staging: self._call_save_hooks(hooks, collected, staging)) if hooks else None
        where = run.place(before)  # asks the user's objects, and the RNG states are read after them
        run.saver.save(folder, collected, about, policy, fill, lambda: run.seal(collected, before, is_alone))
        place.iteration += place.is_automatic
        if not is_alone:
            self._last = folder, where
        return folder

    def _call_save_hooks(self, hooks: Sequence[SaveHook], collected: CollectedState, staging: Path) -> None:
        models = self._run.models
        weights = [
            {
                name.split("/", 2)[2]: tensor
                for name, tensor in collected.tensors.items()
                if name.startswith(f"model/{index}/")
            }
            for index in range(len(models))
        ]
        before = list(weights)
        for hook in hooks:
            hook(models, weights, str(staging))
        for index, own in enumerate(before):
            if not any(own is each for each in weights):
                for name in own:
                    del collected.tensors[f"model/{index}/{name}"]
                for name in [each for each in collected.aliases if each.startswith(f"model/{index}/")]:
                    del collected.aliases[name]

    def wait(self) -> None:
        """Wait until a save behind the loop is on the disk; every rank calls it."""
        self._run.saver.wait()

    # ---------------------------------------------------------------- preemption

    @property
    def is_preempted(self) -> bool:
        """Have all ranks agreed to stop?"""
        return self.guard is not None and self.guard.is_preempted

    def check_preemption(self) -> bool:
        """Stop here where the run is asked to end; returns `is_preempted`."""
        if self.guard is not None:
            self.guard.check()
        return self.is_preempted

    def watch(self, settings: Preemption | None, is_asked_for: bool) -> None:
        """Begin to listen; where nobody has asked for it, only on the main thread, which alone may."""
        if settings is None or (not is_asked_for and threading.current_thread() is not threading.main_thread()):
            return
        self.guard = preemption.PreemptionGuard(settings, self._run, self._save_to_end)
        self._run.expect_saves()
        self._run.ask_before_batches(self.guard.check)
        self._check_steps()

    def stop_watching(self) -> None:
        """Leave signals and deadlines alone from now on, and the folder to others until something is trained or saved again."""
        if self._memory is not None:
            self._memory.settle()
        if self.guard is not None:
            self.guard.stop()
            self._run.ask_before_batches(None)
        self.let_go()

    def start_watching(self) -> None:
        """Listen again, in place of whoever has done so since."""
        if self.guard is None:
            return
        if threading.current_thread() is not threading.main_thread():
            log.info("signals that ask the run to end are not heeded, as this is not the main thread")
            return
        self.guard.start()
        self._run.ask_before_batches(self.guard.check)

    def _check_place(self) -> None:
        """A check of a loop that has no prepared loader in iteration, and of the save behind the loop."""
        self._run.saver.poll()
        if self.guard is not None and self._run.is_without_loader:
            self.guard.check()

    def _save_to_end(self, before: EvaluationStart | None) -> Path:
        """A checkpoint of this place: the one behind the loop where it is of this place, else another."""
        run, (folder, where) = self._run, self._last or (None, None)
        try:
            run.saver.wait()
            # A save of one rank alone may have put it out.
            is_here = (
                folder is not None and where == run.place(before) and not run.custom and (folder / MANIFEST).is_file()
            )
            if run.saver.is_agreed(is_here) and folder is not None:
                return folder
        except CheckpointError as error:
            log.warning("%s; another one is saved now", error)
        return self._commit(None, True, None, before)

    # ---------------------------------------------------------------- hooks and objects

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call it in each save, on every rank, before anything is written."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call it in each load."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def register(self, objects: tuple[Any, ...]) -> None:
        """Save and load these objects too.

        Raises:
            ConfigError: naming those that lack state_dict or load_state_dict.
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
        self._run.custom.extend(objects)

    # ---------------------------------------------------------------- load

    def models_to_load(self, folder: Path) -> list[torch.nn.Module]:
        """The models that the hooks of a load leave to it, for a folder of another program's."""
        models = self._run.models
        for hook in self._load_hooks.values():
            hook(models, str(folder))
        return models

    def load(
        self,
        input_dir: str | Path | None,
        is_strict: bool,
        changed: str | Collection[str] | None = (),
        newest: Callable[[], Path | None] | None = None,
    ) -> Restored:
        """Take a checkpoint up, after prepare: all of it or nothing; every rank calls it.

        Raises:
            StateError: other ranks go on without it.
        """
        meant = check_changed(changed)
        attended = self._run.runtime.scope.own(Attendance).who_comes("load_state")
        if attended.elsewhere:
            raise StateError(
                f"load_state is called {attended}. Every rank takes up its own part of the state, and all check that it fits: call "
                "it on every rank, outside conditions on the rank"
            )
        self._run.saver.wait()
        if self._memory is not None:
            self._memory.settle()
        restored = self._load(
            self.place.to_load(input_dir), is_strict, meant, newest or (None if input_dir else self.place.newest)
        )
        folder = restored.folder
        iteration = restored.about.get("iteration")
        if self._memory is not None and self._memory.holds(folder):  # before the checkpoint of that number
            folder, iteration = self.place.parent() / folder.name, int(iteration or 0) - 1
        self.place.go_on_from(folder, iteration)
        log.info(str(restored))
        return restored

    def _load(
        self, folder: Path, is_strict: bool, changed: Collection[str] | None, newest: Callable[[], Path | None] | None
    ) -> Restored:
        """The state in that folder; where its bytes prove damaged, before anything has changed, that in the next newest."""
        try:
            return self._run.load(folder, is_strict, tuple(self._load_hooks.values()), changed)
        except CheckpointDamaged:
            older = None if newest is None else newest()
            if older in (None, folder):
                raise
        return self._load(older, is_strict, changed, newest)

    def resume(
        self, checkpoint: str | Path, is_strict: bool, run: str | None, changed: str | Collection[str] | None = ()
    ) -> Restored | None:
        """Go on from a checkpoint where there is one."""
        is_newest = str(checkpoint) == "latest"
        folder = self._newest(run) if is_newest else to_path(checkpoint).expanduser().absolute()
        if folder is None:
            if self.place.is_automatic:
                log.info("no checkpoint in %s yet: training begins at the start", self.place.parent())
            else:
                log.warning(_NOT_AUTOMATIC, self.place.parent())
            return None
        restored = self.load(folder, is_strict, changed, partial(self._newest, run) if is_newest else None)
        if is_newest and self.place.project.keep_compiled and compiled.load(restored.folder):
            log.info("compiled code was loaded from %s", restored.folder)
        self._owes_epochs = True
        self._check_steps()
        return restored

    def _newest(self, run: str | None) -> Path | None:
        """The newest state, in memory or on the disk."""
        kept = None if self._memory is None else self._memory.newest()
        try:
            folder = self.place.newest(run)
        except CheckpointError:
            if kept is None:
                raise
            folder = None
        return kept if kept is not None and self._memory and self._memory.is_newer(kept, folder) else folder

    # ---------------------------------------------------------------- epochs

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `num_epochs`."""
        run = self._run
        if self._owes_epochs and run.epoch >= num_epochs:
            log.warning(_NOTHING_LEFT, run.epoch, num_epochs)
        self._owes_epochs = False
        while run.epoch < num_epochs:
            run.begin_epoch()
            yield run.epoch
            if run.is_stopped:  # in its middle: a checkpoint saved now goes on there
                return
            run.end_epoch()

    def _check_resumed(self) -> None:
        """Something is about to learn.

        Raises:
            CheckpointError: an earlier run's checkpoints are in the way, and nothing was resumed.
            StateError: the run was resumed, and its loop over a loader does not go by `epochs`.
        """
        # An evaluation may come before the loop.
        if self._owes_epochs and not self._run.is_without_loader:
            self._owes_epochs = False
            raise StateError(
                f"this run was resumed in epoch {self._run.epoch}, but the loop does not go by it: write `for epoch in "
                "accelerator.epochs(num_epochs):` in place of `for epoch in range(num_epochs):`"
            )
        self.place.check_resumed()


# -------------------------------------------------------------------- arguments


def check_save_arguments(given: Mapping[str, Any]) -> None:
    """Take what has no meaning here with a line in the log; what no engine takes is a ConfigError."""
    for name in given:
        _take("save_state", name)


def check_load_arguments(given: Mapping[str, Any]) -> None:
    """The same for a load; a ConfigError for a place that is none, too."""
    for name, value in given.items():
        if name != "map_location":
            _take("load_state", name)
        elif value is not None and not _is_place(value if isinstance(value, str) else str(value)):
            raise ConfigError(
                f"load_state(map_location={value!r}); allowed: None, 'cpu', 'on_device' or a device. With any of them, "
                "each state goes to the device of its prepared object"
            )


def check_changed(given: str | Collection[str] | None) -> Collection[str] | None:
    """What is another one on purpose than when the checkpoint was saved, as a collection.

    Raises:
        ConfigError: something that is nothing of the kind.
    """
    meant = (given,) if isinstance(given, str) else given
    for name in meant or ():
        if name not in CHANGED:
            raise ConfigError(f"changed={given!r}; allowed: {', '.join(map(repr, CHANGED))}, or several of them")
    return meant


def _is_place(place: str) -> bool:
    kind, colon, number = place.partition(":")
    return place in ("cpu", "on_device") or (is_kind(kind) and (not colon or number.isdigit()))


def _take(method: str, name: str) -> None:
    own, known, always = _ARGUMENTS[method]
    if name not in known.split():
        allowed = [*own.split(), *known.split()]
        hint = did_you_mean(name, allowed)
        raise ConfigError(f"{method}() has no argument {name!r}{hint or '; allowed: ' + ', '.join(allowed)}")
    log.info_once("%s(%s=...) has no effect: it is for an engine that is not in use; %s", method, name, always)
