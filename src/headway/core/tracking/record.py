"""Recorder behind `accelerator.log` and `init_trackers`. It records values, images, files and events of a run."""

import platform
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch

from headway.common.object_path import ObjectPath, to_path
from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.config.run import ProjectConfiguration
from headway.core.runtime import events, heartbeat_file
from headway.core.runtime.process import ProcessRuntime
from headway.core.tracking.base import BlankTracker, Tracker
from headway.core.tracking.pictures import convert_images
from headway.core.tracking.selection import select_trackers, warn_of_unknown_names
from headway.errors import ConfigError, TrackingError
from headway.log import get_logger
from headway.version import __version__

# Imported on first use, because a run without a record does not need them.
if TYPE_CHECKING:
    from headway.core.tracking import run_logger, runlog
    from headway.core.tracking import values as logged_values
else:
    logged_values = LazyModule("headway.core.tracking.values")
    run_logger = LazyModule("headway.core.tracking.run_logger")
    runlog = LazyModule("headway.core.tracking.runlog")

log = get_logger(__name__)

TrackerKwargs = Mapping[str, Mapping[str, Any]]
"""Keyword arguments for each tracker, by the tracker's name."""
STEP = "tracker_step"
"""Key of a checkpoint's notes with the last step that the script passed to a log method."""


class UpdateCounter(Protocol):
    """Interface of an object that counts optimizer updates.

    Attributes:
        num_updates: Number of optimizer updates so far.
    """

    num_updates: int


class EndedRun(NamedTuple):
    """Run that this process has ended, and that it can continue.

    Attributes:
        project: Name of the run.
        folder: Folder of the run; None without one.
        start_time: Start of the run, in seconds since 1970.
    """

    project: str
    folder: Path | None
    start_time: float


class Recorder:
    """Recorder of one Accelerator's run. It writes the run log and calls the trackers.

    Args:
        runtime: Runtime of this process.
        get_project: Function that returns the project configuration, with the folders of the run.
        log_with: Selection of trackers, as passed to the Accelerator.
        update_counter: Counter of optimizer updates.
        notes: Mapping that is stored in each checkpoint's manifest. The recorder adds the last step that the script
            passed.
        has_checkpoints: Function that returns whether there are automatically named checkpoints to resume from.
        get_grad_norm: Function that returns the total norm from the last gradient clipping; None if there was none.

    Attributes:
        run_logger: Run log and trackers of the run in progress. None if there is no run, or nothing to write to on this rank.

    Raises:
        ConfigError: If `log_with` contains an unknown tracker, or one that needs a folder and there is none.
        OptionalDependencyMissing: If the package of a selected tracker is not installed.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        get_project: Callable[[], ProjectConfiguration],
        log_with: Any,
        update_counter: UpdateCounter,
        notes: dict[str, Any],
        has_checkpoints: Callable[[], bool],
        get_grad_norm: Callable[[], torch.Tensor | None],
    ) -> None:
        self.run_logger: run_logger.RunLogger | None = None
        self._runtime = runtime
        self._get_project = get_project
        self._update_counter = update_counter
        self._notes = notes
        self._has_trackers = log_with is not None
        self._has_checkpoints = has_checkpoints
        self._get_grad_norm = get_grad_norm
        is_main = self._runtime.is_main_process
        has_folder = self._get_project().logging_dir is not None
        self._choices = select_trackers(log_with, has_folder=has_folder, is_main=is_main)
        self._pending_resume: events.RunEvent | None = None  # "resumed" event that arrived before `start_run`
        self._ended_run: EndedRun | None = None
        # Flushes the trackers if the process exits during the run. None before the first run
        self._exit_finalizer: weakref.finalize[..., Any] | None = None
        events.subscribe(self._on_event)

    def start_run(self, project_name: str, config: Any = None, init_kwargs: TrackerKwargs | None = None) -> None:
        """Start a run in its folder and in the trackers. A run in progress is ended first.

        Args:
            project_name: Name of the run, or a relative path.
            config: Configuration: a mapping, or an object with attributes, such as a dataclass or an
                argparse.Namespace. Default: None, for an empty configuration.
            init_kwargs: Arguments for each tracker's class, by the tracker's name. Default: None, for no arguments.

        Raises:
            ConfigError: If the name is empty, absolute or contains "..", or if the type of `config` is not allowed.
            TrackingError: If the folder contains a `log.jsonl` that is not a run log.
        """
        path = PurePosixPath(project_name)
        if not str(project_name).strip() or path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"project_name={project_name!r}; give a name, or a relative path without '..'")
        values = runlog.convert_to_json(_convert_to_mapping(config))
        self.end_run()
        is_main = self._runtime.is_main_process
        if is_main:
            warn_of_unknown_names("init_kwargs", init_kwargs or {}, self._choices)
        choices = [each for each in self._choices if is_main or not getattr(each, "main_process_only", True)]
        folder = self._choose_folder(project_name)
        writes_log = is_main and folder is not None
        if not choices and not writes_log:
            self.run_logger = None
            return
        logger = run_logger.RunLogger(
            project_name, folder, choices, is_main, lambda: self._update_counter.num_updates, self._measure_update
        )
        environment = {
            "world_size": self._runtime.world_size,
            "device": self._runtime.hardware.kind,
            "versions": _list_versions(),
        }
        original_start: float | None = None
        ended = self._ended_run
        is_same_run = ended is not None and (ended.project, ended.folder) == (project_name, folder)
        # Without any update, the script more likely starts over than continues.
        if ended is not None and is_same_run and self._update_counter.num_updates > 0:
            original_start = ended.start_time
        logger.start(values, init_kwargs or {}, environment, self._expects_to_continue(logger), original_start)
        self.run_logger = logger
        self._exit_finalizer = run_logger.flush_at_exit(logger)
        if logger.runlog is not None:
            heartbeat_file.get_own_file().set_log(str(logger.runlog.path))
        if self._pending_resume is not None:
            self._on_event(self._pending_resume)

    def _choose_folder(self, project_name: str) -> Path | None:
        """Return the folder of a run, or None if the run has none on this rank.

        If the logging directory is in an object store, rank 0 writes to a local folder, which is uploaded repeatedly.
        Other ranks then have no folder.

        Args:
            project_name: Name of the run, or a relative path.
        """
        logging_dir = self._get_project().logging_dir
        if logging_dir is None:
            return None
        folder = to_path(logging_dir).absolute() / project_name
        if not isinstance(folder, ObjectPath):
            return folder
        if not self._runtime.is_main_process:
            return None
        local_folder: Path = extensions.load("feature", "mirror_log").make_local_folder(folder)
        return local_folder

    def _measure_update(self) -> dict[str, Any]:
        """Return the gradient norm of the last update and this process's memory, for the run log."""
        return {"grad_norm": self._get_grad_norm(), "memory": self._runtime.hardware.get_process_memory()}

    def _expects_to_continue(self, logger: "run_logger.RunLogger") -> bool:
        """Whether the run is expected to continue the one in the existing run log.

        This is a guess that is made before the first value is logged.
        """
        if self._pending_resume is not None:
            return True
        if self._get_project().automatic_checkpoint_naming:
            return self._has_checkpoints()  # without a resume, a save into the same folder is rejected
        return logger.logged_run is not None and not logger.logged_run.is_ended

    # ---------------------------------------------------------------- log

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None) -> None:
        """Log the values of one step. A value that cannot be logged leads to one warning and never ends the run.

        If no run is in progress, nothing is logged, and rank 0 warns once. Numbers of sharded tensors are a collective.

        Args:
            values: Values by name, possibly nested.
            step: Step of the run. Default: the number of optimizer updates.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name. Default: none.
        """
        if isinstance(values, Mapping):
            values = cast(Mapping[str, Any], logged_values.reduce_sharded_numbers(values))
        logger = self._get_run_logger_or_warn()
        if logger is None:
            return
        self._check_log_kwargs(log_kwargs)
        if isinstance(values, Mapping):
            logger.log(values, self._record_step(step), log_kwargs or {}, step)
        else:
            log.warning_once(
                "log() takes a mapping of names and values; %s is left out", logged_values.describe_type(values)
            )

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None
    ) -> None:
        """Log the images of one step.

        Args:
            values: One image, or a list of images, by name, in any form that `pictures.convert_images` accepts.
            step: Step of the run. Default: the number of optimizer updates.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name. Default: none.

        Raises:
            TrackingError: If the shape or type of an image is not supported. The message contains the image's name.
        """
        logger = self._get_run_logger_or_warn()
        if logger is not None:
            self._check_log_kwargs(log_kwargs)
            images = {name: convert_images(value, name) for name, value in values.items()}
            logger.log_images(images, self._record_step(step), log_kwargs or {})

    def log_artifact(
        self,
        path: str | Path,
        name: str | None = None,
        step: int | None = None,
        log_kwargs: TrackerKwargs | None = None,
    ) -> None:
        """Log a file or folder that belongs to the run.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact. Default: the last part of the path.
            step: Step of the run. Default: the number of optimizer updates.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name. Default: none.

        Raises:
            TrackingError: On a rank that records the run, if the file or folder does not exist.
        """
        logger = self._get_run_logger_or_warn()
        if logger is not None:
            self._check_log_kwargs(log_kwargs)
            absolute_path = Path(path).expanduser().absolute()
            if not absolute_path.exists():
                raise TrackingError(f"log_artifact({str(path)!r}): there is no such file or folder; write it first")
            logger.log_artifact(absolute_path, name or absolute_path.name, self._record_step(step), log_kwargs or {})

    def log_event(self, name: str, step: int | None, details: dict[str, Any]) -> None:
        """Log a run event. Nothing is logged if no run is in progress.

        Args:
            name: Kind of event.
            step: Number of optimizer updates at which the event occurred; None for the current number.
            details: Details of the event, as JSON values.
        """
        if self.run_logger is not None:
            self.run_logger.log_event(name, step, details)

    def _get_run_logger_or_warn(self) -> "run_logger.RunLogger | None":
        """Return the run in progress. Without one, return None, and let rank 0 warn once."""
        if self.run_logger is None and self._runtime.is_main_process:
            if self._has_trackers or self._get_project().logging_dir is not None:
                log.warning_once("log() has no effect before accelerator.init_trackers(project_name); call that first")
            else:
                log.warning_once(
                    "log() has no effect, because the Accelerator has neither a project_dir for the run's log nor trackers. Pass "
                    "Accelerator(project_dir=...), log_with=... or both, and call accelerator.init_trackers(project_name)"
                )
        return self.run_logger

    def _record_step(self, step: int | None) -> int:
        """Return the step to log for: the script's, which is then saved in checkpoints, or the number of updates."""
        if step is None:
            return self._update_counter.num_updates
        whole_step = int(step)
        if whole_step != step:
            log.warning_once(
                "log() got a step that is not a whole number, and drops its fraction, so values of different steps replace each "
                "other; give the number of updates or samples instead"
            )
        self._notes[STEP] = whole_step
        return whole_step

    def _check_log_kwargs(self, log_kwargs: TrackerKwargs | None) -> None:
        """On rank 0, warn once of entries for trackers that do not exist."""
        if log_kwargs and self._runtime.is_main_process:
            warn_of_unknown_names("log_kwargs", log_kwargs, self._choices)

    def _on_event(self, event: events.RunEvent) -> None:
        """Record an event that another component of this process published.

        Events of other Accelerators' runs are ignored. A "resumed" event that arrives before `start_run` is recorded
        when the run starts. This method may be called from any thread.
        """
        if event.source not in (None, self._update_counter):
            return
        details = dict(event.details)
        if event.name != "resumed":
            if self.run_logger is not None:
                self.run_logger.log_event(event.name, event.step, details)
            return
        if self.run_logger is None:
            self._pending_resume = event
            return
        self._pending_resume = None
        notes = details.pop("notes", None)
        script_step = notes.get(STEP) if isinstance(notes, Mapping) else None
        last_step = event.step or 0
        if isinstance(script_step, int):
            self._notes[STEP] = script_step
            last_step = max(last_step, script_step)
        self.run_logger.log_resume(last_step, details)

    # ---------------------------------------------------------------- trackers

    @property
    def trackers(self) -> list[Tracker]:
        """Trackers that are in use on this rank."""
        guarded_trackers = [] if self.run_logger is None else self.run_logger.guarded_trackers
        return [each.tracker for each in guarded_trackers if each.tracker is not None and each.is_used]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        If the tracker is selected but not in use on this rank, return a placeholder that does nothing.

        Args:
            name: Name of the tracker.
            unwrap: Whether to return the package's own object, such as its run.

        Raises:
            ConfigError: If `log_with` contains no tracker with this name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        selected = [choice.name for choice in self._choices]
        if str(name) not in selected:
            raise ConfigError(
                f"get_tracker({name!r}): log_with has {', '.join(selected) if selected else 'no trackers'}"
            )
        return BlankTracker()

    def end_run(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the run, its run log and its trackers. Do nothing if no run is in progress.

        Args:
            summary: Final values of the run, possibly nested. Values that are neither numbers nor strings are left out.
                Default: None, for none.
        """
        logger = self.run_logger
        self.run_logger = None
        if logger is not None:
            if self._exit_finalizer is not None:
                self._exit_finalizer.detach()
            self._ended_run = EndedRun(logger.project, logger.folder, logger.start_time)
            logger.finish(_simplify_summary(summary))
            if isinstance(to_path(self._get_project().logging_dir or ""), ObjectPath):
                extensions.load("feature", "mirror_log").send_all()


def _simplify_summary(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the summary's numbers and strings as Python values, with joined names for nested values."""
    flat = logged_values.flatten(summary or {})
    return {name: logged_values.to_python(value) for name, value in flat.items() if logged_values.is_loggable(value)}


def _convert_to_mapping(config: Any) -> dict[str, Any]:
    """Return a configuration as a dict. None becomes an empty dict.

    Raises:
        ConfigError: If it is neither a mapping nor an object with attributes.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "__dict__") and not isinstance(config, type):
        return dict(vars(config))
    if is_dataclass(config) and not isinstance(config, type):  # with slots, it has no `__dict__`
        return {each.name: getattr(config, each.name) for each in fields(config)}
    raise ConfigError(f"config={config!r} is not a configuration; give a mapping, a dataclass or an argparse.Namespace")


def _list_versions() -> dict[str, str]:
    """Return the versions of headway, torch and Python, for the run log."""
    return {"headway": __version__, "torch": torch.__version__, "python": platform.python_version()}
