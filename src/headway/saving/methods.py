"""The Accelerator's methods about checkpoints: save, load, resume, and the epochs that are left."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.checkpoint.folders import committed, copy_of, originals
from headway.checkpoint.foreign import explain, foreign_in
from headway.checkpoint.manifest import MANIFEST, read_manifest
from headway.checkpoint.saver import Policy
from headway.checkpoint.state import Collected
from headway.config.preemption import Preemption
from headway.config.run import ProjectConfiguration
from headway.errors import CheckpointError, ConfigError, StateError
from headway.log import get_logger
from headway.runtime.callers import Callers, calling_ranks
from headway.saving.arguments import check_load_arguments, check_save_arguments
from headway.saving.evaluation import Beginning
from headway.saving.preemption import Guard
from headway.saving.run import Restored, RunState

log = get_logger(__name__)

SaveHook = Callable[[list[torch.nn.Module], list[dict[str, torch.Tensor]], str], None]
LoadHook = Callable[[list[torch.nn.Module], str], None]
FOLDER = "checkpoints"


class HookHandle:
    """Takes a hook off again."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Take it off; a second time does nothing."""
        self._hooks[:] = [each for each in self._hooks if each is not self._hook]


class Saving:
    """The half of the Accelerator that saves and resumes.

    Args:
        run_state: what is saved.
        project: where, and how many.
    """

    def __init__(self, run_state: RunState, project: ProjectConfiguration) -> None:
        self._run_state = run_state
        run_state.is_saving = project.automatic_checkpoint_naming
        self.project_configuration = project
        self._iteration = project.iteration
        self._save_hooks: list[SaveHook] = []
        self._load_hooks: list[LoadHook] = []
        self._owes_epochs = False
        self._last: tuple[Path, tuple[object, ...]] | None = None
        self._guard: Guard | None = None
        self._has_told_alone = False
        self._earlier = self._find_earlier()

    # ---------------------------------------------------------------- save

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self._iteration

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True, *, blocking: bool = True,
                   metric: float | None = None, **save_model_func_kwargs: Any) -> Path:  # fmt: skip
        """Commit a checkpoint of everything prepared and registered; every rank calls it.

        It is on the disk when this returns. A kill at any moment before leaves the former checkpoint as it was. Called under a
        condition that lets one rank pass only (`if accelerator.is_main_process:`), that rank writes everything but the other
        ranks' random streams, and says so once.

        Args:
            output_dir: its folder; a checkpoint that is there is exchanged for the new one. Not read with automatic naming,
                where it is `<project_dir>/checkpoints/checkpoint_<n>`.
            safe_serialization: accepted for the name's sake: checkpoints hold safetensors and JSON, never pickles.
            blocking: False: return when the state is copied to host memory, and write behind the loop. The next save waits
                for it; an error is raised by the next `accumulate`, save, or `end_training`.
            metric: how good this state is, for `ProjectConfiguration(keep_best=...)`.
            save_model_func_kwargs: accepted for the name's sake: what engines that are not in use take.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: on every rank, where any could not write; former checkpoints are intact.
            ConfigError: no folder was given, and there is no automatic naming; or an unknown argument.
        """
        check_save_arguments(save_model_func_kwargs)
        runtime = self._run_state.runtime
        callers = calling_ranks(runtime)
        if len(callers.ranks) == runtime.world_size or callers.ranks[0] not in (0, runtime.rank):
            return self._commit(output_dir, blocking, metric)
        if callers.ranks[0] == runtime.rank:
            self._tell_alone(callers)
            return self._commit(output_dir, blocking, metric, is_alone=True)
        # The first process of another machine, say: rank 0 writes.
        folder = self._folder_for(output_dir)
        self._iteration += self.project_configuration.automatic_checkpoint_naming
        return folder

    def _tell_alone(self, callers: Callers) -> None:
        if not self._has_told_alone:
            self._has_told_alone = True
            log.warning(
                "save_state at %s is called on rank %d only, %s: the checkpoint holds everything but the random streams of the other "
                "ranks, which are derived anew after a resume. To keep them too, call it on every rank",
                callers.call_site, callers.ranks[0], callers.reason, main_process_only=False,
            )  # fmt: skip

    def _commit(self, output_dir: str | Path | None, is_blocking: bool, metric: float | None,
                before: Beginning | None = None, is_alone: bool = False) -> Path:  # fmt: skip
        run, project = self._run_state, self.project_configuration
        run.saver.wait(is_alone)
        if not is_alone:  # some ranks may have saved without the others
            self._iteration = run.saver.meet(self._iteration)
        folder = self._folder_for(output_dir)
        collected, about = run.collect(before, is_alone)
        about |= {
            "name": folder.name,
            "iteration": self._iteration,
            "metric": None if metric is None else float(metric),
        }
        is_automatic = project.automatic_checkpoint_naming
        policy = Policy(
            project.total_limit if is_automatic else None, self._protected(folder, metric), is_automatic, is_blocking,
            is_alone=is_alone,
        )  # fmt: skip
        fill = (lambda staging: self._call_save_hooks(collected, staging)) if self._save_hooks else None
        place = run.place(before)  # asks the user's objects, and the random streams are read after them
        run.saver.save(folder, collected, about, policy, fill, lambda: run.seal(collected, before, is_alone))
        if is_automatic:
            self._iteration += 1
        if not is_alone:
            self._last = folder, place
        return folder

    def wait_for_save(self) -> None:
        """Wait until a save behind the loop is on the disk; every rank calls it.

        Raises:
            CheckpointError: on every rank, where any could not write.
        """
        self._run_state.saver.wait()

    # ---------------------------------------------------------------- preemption

    @property
    def preempted(self) -> bool:
        """Have all ranks agreed to stop? Then save and end; only with `Preemption(exits=False)`, else the run has ended."""
        return self._guard is not None and self._guard.is_preempted

    def check_preemption(self) -> bool:
        """Stop here where the run is asked to end; for loops without a prepared loader. Every rank calls it alike.

        Returns:
            `preempted`.

        Raises:
            Preempted: a checkpoint was committed on all ranks; let it end the process.
        """
        if self._guard is not None:
            self._guard.check()
        return self.preempted

    def _watch_for_preemption(self, settings: Preemption | None, is_asked_for: bool) -> None:
        """Begin to listen; where nobody has asked for it, only on the main thread, which alone may."""
        if settings is None or (not is_asked_for and threading.current_thread() is not threading.main_thread()):
            return
        run = self._run_state
        self._guard = Guard(settings, run, self._save_to_end)
        run.is_saving, run.at_fetch = True, self._guard.at_fetch

    def stop_watching(self) -> None:
        """Leave signals and deadlines alone from now on, where the training is over; every rank calls it."""
        if self._guard is not None:
            self._guard.stop()
            self._run_state.at_fetch = None

    def _begin_micro_batch(self) -> None:
        """A check of a loop that has no prepared loader in iteration, and of the save behind the loop."""
        self._check_resumed()
        self._run_state.saver.poll()
        if self._guard is not None and self._run_state.is_without_loader:
            self._guard.check()

    def _save_to_end(self, before: Beginning | None) -> Path:
        """A checkpoint of this place: the one behind the loop where it is of this place, else another."""
        run = self._run_state
        try:
            run.saver.wait()
            is_here = self._last is not None and self._last[1] == run.place(before) and not run.custom
            # A save of one rank alone may have put it out.
            if run.saver.is_agreed(is_here and self._last is not None and (self._last[0] / MANIFEST).is_file()):
                assert self._last is not None
                return self._last[0]
        except CheckpointError as error:
            log.warning("%s; another one is saved now", error)
        return self._commit(None, True, None, before)

    def _folder_for(self, output_dir: str | Path | None) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigError(
                    "save_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return Path(output_dir).expanduser().absolute()
        folder = self._parent() / f"checkpoint_{self._iteration}"
        others = self._later_ones()
        if others:
            raise CheckpointError(_used(others[0]))
        return folder

    def _later_ones(self) -> list[Path]:
        """Checkpoints with numbers that this run has still to give, newest first."""
        later = [path for path in committed(self._parent()) if (_number(path) or 0) >= self._iteration]
        # A copy is in the way only where the next one goes.
        return [path for path in later if path.name == f"checkpoint_{self._iteration}" or not copy_of(path)]

    def _find_earlier(self) -> tuple[Path, tuple[int, int]] | None:
        """The newest checkpoint of an earlier run in this run's way, before it has saved itself, and which file it is."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            return None
        found = self._later_ones()
        return (found[0], _identity(found[0])) if found else None

    def _check_resumed(self) -> None:
        """Training begins: refuse it here, rather than at the first save, where an earlier run's checkpoints are in the way.

        Raises:
            CheckpointError: they are, and nothing was resumed.
        """
        if self._earlier is None:
            return
        (folder, identity), self._earlier = self._earlier, None
        if folder.parent == self._parent() and (folder / MANIFEST).exists() and _identity(folder) == identity:
            raise CheckpointError(_used(folder))

    def _parent(self) -> Path:
        project = self.project_configuration
        if project.project_dir is None:
            raise ConfigError("automatic checkpoints need a place: pass project_dir= to the Accelerator")
        return Path(project.project_dir).absolute() / FOLDER

    def _has_checkpoints(self) -> bool:
        """Are there automatically named ones that a resume would find?"""
        project = self.project_configuration
        is_named = project.automatic_checkpoint_naming and project.project_dir is not None
        return is_named and bool(originals(self._parent()))

    def _protected(self, folder: Path, metric: float | None) -> tuple[Path, ...]:
        """The folder of this run's best checkpoint, by the metrics in the manifests; of equal ones the earliest."""
        wanted = self.project_configuration.keep_best
        if wanted is None:
            return ()
        scores = {} if metric is None else {folder: float(metric)}
        for path in committed(folder.parent):
            try:
                about = read_manifest(path).about
            except CheckpointError:
                continue  # a damaged one is not the best one
            known = about.get("metric")
            is_copy = about.get("name", path.name) != path.name
            if isinstance(known, float) and not is_copy and about.get("run", "") == self._run_state.run_id:
                scores[path] = known
        if not scores:
            return ()
        sign = -1 if wanted == "max" else 1
        return (min(scores, key=lambda path: (sign * scores[path], _number(path) or 0)),)

    def _call_save_hooks(self, collected: Collected, staging: Path) -> None:
        models = self._run_state.models
        weights = [
            {
                name.split("/", 2)[2]: tensor
                for name, tensor in collected.tensors.items()
                if name.startswith(f"model/{index}/")
            }
            for index in range(len(models))
        ]
        before = list(weights)
        for hook in self._save_hooks:
            hook(models, weights, str(staging))
        for index, own in enumerate(before):
            if not any(own is each for each in weights):
                for name in own:
                    del collected.tensors[f"model/{index}/{name}"]
                for name in [each for each in collected.aliases if each.startswith(f"model/{index}/")]:
                    del collected.aliases[name]

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call `hook(models, weights, folder)` in each save, on every rank, before anything is written.

        Files it writes into the folder belong to the checkpoint; a model whose entry it takes out of `weights` (one dict
        of name and tensor for each model) is not saved.
        """
        self._save_hooks.append(hook)
        return HookHandle(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call `hook(models, folder)` in each load; a model it takes out of the list is not loaded."""
        self._load_hooks.append(hook)
        return HookHandle(self._load_hooks, hook)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too: anything with state_dict and load_state_dict, of values without pickle.

        Raises:
            ConfigError: naming those that lack one of the two.
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
        self._run_state.custom.extend(objects)

    # ---------------------------------------------------------------- load

    def load_state(self, input_dir: str | Path | None = None, load_kwargs: Mapping[str, Any] | None = None, *,
                   strict: bool = False, **load_model_func_kwargs: Any) -> Restored:  # fmt: skip
        """Take a checkpoint up, after prepare: all of it or nothing; every rank calls it.

        Args:
            input_dir: its folder; None, with automatic naming: the newest one that verifies.
            load_kwargs: accepted for the name's sake: nothing is unpickled.
            strict: refuse a checkpoint of another world size, batch size, precision or version.
            load_model_func_kwargs: accepted for the name's sake: `map_location` ("cpu" or "on_device"), as the state goes
                to where each object is; and what engines that are not in use take.

        Returns:
            What was restored and what differs; printable.

        Raises:
            CheckpointError: on every rank: missing, damaged, or it does not fit; nothing is changed then.
            ConfigError: no folder was given, and there is no automatic naming; or an unknown argument.
        """
        check_load_arguments({**(load_kwargs or {}), **load_model_func_kwargs})
        self._run_state.saver.wait()
        if input_dir is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ConfigError(
                    "load_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            folder = self._newest()
            if folder is None:
                raise CheckpointError(f"{self._parent()} holds no checkpoint; save_state() makes the first one")
        else:
            folder = Path(input_dir).expanduser().absolute()
        restored = self._run_state.load(folder, strict, self._load_hooks)
        self._earlier = None
        iteration = restored.about.get("iteration")
        if self.project_configuration.automatic_checkpoint_naming and isinstance(iteration, int):
            # What lies beyond it was not resumed from, and must not be taken for its continuation.
            there = [*committed(folder.parent), *committed(self._parent())]
            numbers = [(_number(path) or 0, path) for path in there]
            newest = max((each for each, path in numbers if each > iteration and not copy_of(path)), default=iteration)
            self._iteration = self._run_state.saver.largest(max(iteration, newest)) + 1
        log.info(str(restored))
        return restored

    def resume(self, checkpoint: str | Path = "latest", *, strict: bool = False,
               run: str | None = None) -> Restored | None:  # fmt: skip
        """Go on from a checkpoint where there is one; call it after prepare, and loop over `epochs(n)`.

        Args:
            checkpoint: "latest": the newest one in the project's folder that verifies; one that does not is named and
                passed over. Or a folder.
            strict: as for load_state.
            run: with "latest", look among the checkpoints of this run only: "run" in their manifests. None: among all.

        Returns:
            What was restored, or None where "latest" found nothing yet.

        Raises:
            CheckpointError: on every rank: damaged (a folder that was given), or it does not fit.
        """
        folder = self._newest(run) if str(checkpoint) == "latest" else Path(checkpoint).expanduser().absolute()
        if folder is None:
            log.info("no checkpoint in %s yet: training begins at the start", self._parent())
            return None
        restored = self.load_state(folder, strict=strict)
        self._owes_epochs = True
        for loader in self._run_state.loaders:
            loader.before_pass = self._check_epochs
        return restored

    def _newest(self, run: str | None = None) -> Path | None:
        folder, passed_over = self._run_state.saver.newest(self._parent(), run)
        for line in passed_over:
            log.warning("a checkpoint is passed over: %s", line)
        copies = committed(self._parent()) if folder is None and not passed_over and run is None else []
        if copies and all(map(copy_of, copies)):
            raise CheckpointError(
                f"{self._parent()} holds copies only ({copies[0].name} was saved as {copy_of(copies[0])}), and 'latest' means the "
                f"newest that a run has put there itself; give the one to go on from: resume('{copies[0]}')"
            )
        foreign = foreign_in(self._parent()) if folder is None else None
        if foreign is not None and not passed_over:
            raise CheckpointError(f"{explain(foreign)}. To begin without it, give another project_dir")
        if folder is None and passed_over:
            raise CheckpointError(
                f"{self._parent()} holds {len(passed_over)} checkpoints, and all of them are damaged:\n  "
                + "\n  ".join(passed_over)
            )
        return folder

    # ---------------------------------------------------------------- epochs

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left of `num_epochs`: after a resume from the restored one.

        Args:
            num_epochs: of the whole training, 0 or more.
        """
        run = self._run_state
        self._owes_epochs = False
        while run.epoch < num_epochs:
            run.begin_epoch()
            yield run.epoch
            if run.is_stopped:  # in its middle: a checkpoint saved now goes on there
                return
            run.end_epoch()

    def _check_epochs(self) -> None:
        if self._owes_epochs:
            self._owes_epochs = False
            raise StateError(
                f"this run was resumed in epoch {self._run_state.epoch}, but the loop does not go by it: write `for epoch in "
                "accelerator.epochs(num_epochs):` in place of `for epoch in range(num_epochs):`"
            )


def _used(earlier: Path) -> str:
    if name := copy_of(earlier):
        return f"{earlier} is a copy of {name}, and stands where the next checkpoint goes; give it another name"
    return (
        f"{earlier.parent} already has {earlier.name}, from an earlier run, and this run has not resumed from it. Go on from it with "
        "accelerator.resume('latest') after prepare(), or give another project_dir"
    )


def _identity(folder: Path) -> tuple[int, int]:
    """Which file a checkpoint's manifest is."""
    found = (folder / MANIFEST).stat()
    return found.st_ino, found.st_mtime_ns


def _number(path: Path) -> int | None:
    found = re.search(r"(\d+)$", path.name)
    return int(found[1]) if found else None
