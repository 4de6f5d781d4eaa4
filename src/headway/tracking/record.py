"""The record of a run: begun, fed with values, images, files and events, and ended; behind `log` and `init_trackers`."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

import torch

from headway.common.object_path import ObjectPath, to_path
from headway.common.optional import Later
from headway.config.run import ProjectConfiguration
from headway.errors import ConfigError, TrackingError
from headway.log import get_logger
from headway.runtime import events, pulse
from headway.runtime.process import ProcessRuntime
from headway.tracking.base import BlankTracker, Tracker, select_trackers
from headway.tracking.pictures import pictures
from headway.version import __version__

# A run that keeps no record has no use for these.
if TYPE_CHECKING:
    from headway.tracking import feed as feeding
    from headway.tracking import mirror, runlog
else:
    feeding = Later("headway.tracking.feed")
    mirror = Later("headway.tracking.mirror")
    runlog = Later("headway.tracking.runlog")

log = get_logger(__name__)

TrackerKwargs = Mapping[str, Mapping[str, Any]]
STEP = "tracker_step"


class UpdateCounter(Protocol):
    """What counts updates."""

    num_updates: int


class RunRecorder:
    """Keeps a record of one Accelerator's run.

    Args:
        runtime: this process.
        project: gives where the run keeps its files.
        log_with: see `headway.tracking.base`.
        clock: counts updates.
        notes: goes into each checkpoint's manifest: the last step that the script gave itself stands there.
        has_checkpoints: are there automatically named ones that a resume would find?
        grad_norm: the total norm of the last clipping.
    """

    def __init__(
        self,
        runtime: ProcessRuntime,
        project: Callable[[], ProjectConfiguration],
        log_with: Any,
        clock: UpdateCounter,
        notes: dict[str, Any],
        has_checkpoints: Callable[[], bool],
        grad_norm: Callable[[], torch.Tensor | None],
    ) -> None:
        self.feed: feeding.RunFeed | None = None
        self._runtime, self._project = runtime, project
        self._progress, self._notes = clock, notes
        self._has_trackers = log_with is not None
        self._has_checkpoints, self._grad_norm = has_checkpoints, grad_norm
        is_main = self._runtime.is_main_process
        has_folder = self._project().logging_dir is not None
        self._choices = select_trackers(log_with, has_folder=has_folder, is_main=is_main)
        self._is_begun = False
        self._resumed: events.RunEvent | None = None
        self._ended: tuple[tuple[str, Path | None], float] | None = None
        events.subscribe(self._on_event)

    def begin(self, project_name: str, config: Any = None, init_kwargs: TrackerKwargs | None = None) -> None:
        """Begin a run in its folder and in the trackers; one that is under way ends first.

        Raises:
            ConfigError: a name that is not a relative path, or a config that is not a mapping.
            TrackingError: the folder holds a `log.jsonl` of something else.
        """
        path = PurePosixPath(project_name)
        if not str(project_name).strip() or path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"project_name={project_name!r}; give a name, or a relative path without '..'")
        values = runlog.plain(_as_mapping(config))
        self.end()
        is_main, place = self._runtime.is_main_process, self._project().logging_dir
        self._is_begun = place is not None
        choices = [each for each in self._choices if is_main or not getattr(each, "main_process_only", True)]
        folder = None if place is None else to_path(place).absolute() / project_name
        if isinstance(folder, ObjectPath):
            folder = mirror.local_folder(folder) if is_main else None
        if not choices and not (is_main and folder is not None):
            self.feed = None
            return
        feed = feeding.RunFeed(
            project_name, folder, choices, is_main, lambda: self._progress.num_updates, self._measure
        )
        about = {"world_size": self._runtime.world_size, "device": self._runtime.hardware.kind, "versions": _versions()}
        same = self._ended is not None and self._ended[0] == (project_name, folder) and self._progress.num_updates > 0
        since = self._ended[1] if self._ended is not None and same else None
        feed.start(values, init_kwargs or {}, about, self._is_continuing(feed), since)
        self.feed, self._at_exit = feed, feeding.flush_at_exit(feed)
        if feed.runlog is not None:
            pulse.own().set_log(str(feed.runlog.path))
        if self._resumed is not None:
            self._on_event(self._resumed)

    def _measure(self) -> dict[str, Any]:
        return {"grad_norm": self._grad_norm(), "memory": self._runtime.hardware.process_memory()}

    def _is_continuing(self, feed: "feeding.RunFeed") -> bool:
        """Is it the run that the log knows, as far as one can tell before the first value?"""
        if self._resumed is not None:
            return True
        if self._project().automatic_checkpoint_naming:
            return self._has_checkpoints()  # a save beside them without a resume is refused
        return feed.before is not None and not feed.before.is_ended

    # ---------------------------------------------------------------- log

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None) -> None:
        """Log values of one step; what cannot be logged is warned about once, and never ends the run."""
        feed = self._feed_or_hint()
        if feed is None:
            return
        if isinstance(values, Mapping):
            feed.log(values, self._note_step(step), log_kwargs or {}, step)
        else:
            log.warning_once("log() takes a mapping of names and values; %s is left out", feeding.describe(values))

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: TrackerKwargs | None = None
    ) -> None:
        """Log images of one step.

        Raises:
            TrackingError: another shape or type, with its name.
        """
        feed = self._feed_or_hint()
        if feed is not None:
            images = {name: pictures(value, name) for name, value in values.items()}
            feed.log_images(images, self._note_step(step), log_kwargs or {})

    def log_artifact(
        self,
        path: str | Path,
        name: str | None = None,
        step: int | None = None,
        log_kwargs: TrackerKwargs | None = None,
    ) -> None:
        """Log a file or folder that belongs to the run.

        Raises:
            TrackingError: on rank 0: there is nothing.
        """
        feed = self._feed_or_hint()
        if feed is not None:
            where = Path(path).absolute()
            if not where.exists():
                raise TrackingError(f"log_artifact({str(path)!r}): there is no such file or folder; write it first")
            feed.log_artifact(where, name or where.name, self._note_step(step), log_kwargs or {})

    def log_event(self, name: str, step: int | None, details: dict[str, Any]) -> None:
        """Note that something happened."""
        if self.feed is not None:
            self.feed.event(name, step, details)

    def _feed_or_hint(self) -> "feeding.RunFeed | None":
        is_kept = self._has_trackers or self._project().logging_dir is not None
        if self.feed is None and self._runtime.is_main_process and is_kept:
            log.warning_once("log() keeps nothing: call accelerator.init_trackers(project_name) first")
        return self.feed

    def _note_step(self, step: int | None) -> int:
        if step is None:
            return self._progress.num_updates
        self._notes[STEP] = int(step)
        return int(step)

    def _on_event(self, happening: events.RunEvent) -> None:
        """Something happened to this process; on any thread."""
        if happening.source not in (None, self._progress):
            return
        details = dict(happening.details)
        if happening.name != "resumed":
            if self.feed is not None:
                self.feed.event(happening.name, happening.step, details)
            return
        notes = details.pop("notes", None)
        given = notes.get(STEP) if isinstance(notes, Mapping) else None
        if self.feed is None:
            self._resumed = happening
            return
        self._resumed = None
        if isinstance(given, int):
            self._notes[STEP] = given
        self.feed.resumed(max(happening.step or 0, given if isinstance(given, int) else 0), details)

    # ---------------------------------------------------------------- trackers

    @property
    def trackers(self) -> list[Tracker]:
        """This rank's trackers that are in use."""
        several = [] if self.feed is None else self.feed.guarded
        return [each.tracker for each in several if each.tracker is not None and not each.is_dropped]

    def tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; one that does nothing where this rank has none.

        Raises:
            ConfigError: `log_with` names no such tracker.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        known = [each.name for each in self._choices]
        if str(name) not in known:
            raise ConfigError(f"get_tracker({name!r}): log_with has {', '.join(known) if known else 'no trackers'}")
        return BlankTracker()

    def end(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the run, where one is under way, with its log and its trackers."""
        feed, self.feed = self.feed, None
        if feed is not None:
            self._at_exit.detach()
            self._ended = (feed.project, feed.folder), feed.begun
            feed.finish(_plain_summary(summary))
            if isinstance(to_path(self._project().logging_dir or ""), ObjectPath):
                mirror.send_all()


def _plain_summary(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    flat = feeding.flatten(summary or {})
    return {name: feeding.to_python(value) for name, value in flat.items() if feeding.is_loggable(value)}


def _as_mapping(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "__dict__") and not isinstance(config, type):
        return dict(vars(config))
    raise ConfigError(f"config={config!r} is not a configuration; give a mapping, a dataclass or an argparse.Namespace")


def _versions() -> dict[str, str]:
    return {"headway": __version__, "torch": torch.__version__, "python": platform.python_version()}
