"""What a tracker is: the protocol that the built-in ones follow, the base of a user's own, and that of other packages' trackers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from headway.common import env
from headway.common.optional import require
from headway.config.launch import Spelled
from headway.runtime import process
from headway.tracking.pictures import Picture, numbered, pictures, without_axis


class LoggerType(Spelled):
    """Names for `log_with`; their text does as well."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    OPENTELEMETRY = "opentelemetry"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run begins.

    Attributes:
        project: the run's name, as given to `init_trackers`.
        folder: where the run's files go: `<logging_dir>/<project>`; None without a logging_dir.
        identity: what the tracker's `identity` was when a process before this one began the run, which now goes on; None: a
            new run.
    """

    project: str
    folder: Path | None = None
    identity: Mapping[str, Any] | None = None


class Tracker:
    """Where a run's values go; subclass it for your own, and give an instance to `Accelerator(log_with=...)`.

    Needed are `name`, `tracker`, `store_init_configuration` and `log`; everything else has a default. What a tracker raises
    is warned about and never reaches the loop; after three failures in a row it gets nothing more.

    Attributes:
        name: how `get_tracker` finds it.
        requires_logging_directory: it writes files, so that the Accelerator must have a `project_dir` or `logging_dir`.
        main_process_only: it lives on rank 0 only; False: on every rank.
        holds_back: for how many seconds values may be on their way and die with the process, `flush` or not: a run that goes
            on after a kill is fed again what was logged in so many seconds before it.
        takes: what `log` is given: "numbers" (and texts), "objects" of any kind beside them, or all as it was "given", with
            nested mappings, tensors and None, and with no step where the script names none.
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True
    holds_back: float = 0.0
    takes: str = "objects"

    @property
    def tracker(self) -> Any:
        """The object underneath: what `get_tracker(name, unwrap=True)` gives."""
        return self

    @property
    def identity(self) -> dict[str, Any] | None:
        """What finds this run again after a restart, as JSON has it; None: nothing is needed."""
        return None

    def begin(self, run: TrackedRun) -> None:
        """A run begins; also after `finish`, where the same process begins another."""
        self.start()

    def start(self) -> None:
        """A run begins, for those who need not know which."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration: JSON values, perhaps nested."""
        raise NotImplementedError(f"{type(self).__name__} needs store_init_configuration(values)")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one step: names to numbers, texts, and what else the script logs (see `takes`).

        Args:
            values: flat.
            step: an update's number, or what was given to `accelerator.log`.
            kwargs: `log_kwargs` of this tracker.
        """
        raise NotImplementedError(f"{type(self).__name__} needs log(values, step=None, **kwargs)")

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Keep images: arrays of bytes [H, W, C]. Default: nothing; the run's log has them."""

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Keep a file or a folder. Default: nothing; the run's log says where it lies."""

    def log_event(self, name: str, details: Mapping[str, Any], step: int | None = None) -> None:
        """Something happened, such as "checkpoint", "resumed" or "out_of_memory"; on any thread. Default: nothing.

        Args:
            name: what; the names are those of the run's log.
            details: what else is known, as JSON has it.
            step: the update it belongs to.
        """

    def rewind(self, step: int) -> None:
        """The run was resumed: what was logged for steps after this one is superseded. Default: nothing."""

    def flush(self) -> None:
        """The process ends without `finish`: let what was logged reach the disk. Default: nothing."""

    def finish(self) -> None:
        """The run is over. Default: nothing."""


@dataclass(frozen=True)
class TrackerMaker:
    """A tracker that is made when a run begins; `log_with` accepts it instead of an instance.

    Attributes:
        name: the tracker's.
        make: gives it, from what `init_kwargs` has under its name.
        requires_logging_directory: as the tracker's.
    """

    name: str
    make: Callable[..., Tracker]
    requires_logging_directory: bool = False


GeneralTracker = Tracker


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a tracker's methods: on other ranks than 0 they do nothing, where the tracker is `main_process_only`."""

    @wraps(function)
    def call(self: Tracker, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not _is_main():
            return None
        return function(self, *args, **kwargs)

    return call


def _is_main() -> bool:
    # A run's trackers end after its process group, which a question would start again, and wait for the others for ever.
    return process.current().is_main_process if process.is_started() else env.rank() == 0


class BlankTracker:
    """Stands where a rank has no tracker: every attribute is itself, every call does nothing, and it is false."""

    def __getattr__(self, name: str) -> "BlankTracker":
        if name.startswith("__"):  # protocols of copying and pickling ask for these
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "BlankTracker":
        return self

    def __bool__(self) -> bool:
        return False


class PackageAdapter(Tracker):
    """Holds the object that a package gave for the run; a subclass's `begin` sets `_run`.

    Args:
        kwargs: for the package's own function that begins a run; they win over what Headway chooses.
    """

    installed_by: ClassVar[str] = ""
    """What to install where the package is missing; empty: the package."""
    known_by: ClassVar[tuple[str, str] | None] = None
    """What finds the run again after a restart: its keyword, and the attribute of the run that has it."""
    takes = "numbers"
    ended_by: ClassVar[str] = "finish"
    """The run's method that ends it."""

    def __init__(self, **kwargs: Any) -> None:
        self._package: Any = require(self.name, f"log_with={self.name!r} needs", self.installed_by or self.name)
        self._kwargs = kwargs
        self._run: Any = None
        self._is_own = True

    @property
    def tracker(self) -> Any:
        """The object that the package gave."""
        return self._run

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the package finds the run again by."""
        if self.known_by is None or self._run is None:
            return None
        keyword, attribute = self.known_by
        return {keyword: getattr(self._run, attribute)}

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value by itself, numbers as metrics and texts as the package has them."""
        for name, value in values.items():
            self._log_value(name, value, step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Each image by itself, numbered where one name has several."""
        for name, part, image in numbered(values):
            self._log_image(name, part, image, step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """End the run, and wait for uploads; one that the script began itself is left open."""
        if self._is_own:
            getattr(self._run, self.ended_by)()


class RowAdapter(PackageAdapter):
    """For packages that take all values of a step in one call."""

    known_by: ClassVar[tuple[str, str]] = ("id", "id")
    takes = "objects"

    run = PackageAdapter.tracker
    """The name that scripts know."""

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        self._run = self._package.init(**self._choose_arguments(run))

    def _choose_arguments(self, run: TrackedRun, **chosen: Any) -> dict[str, Any]:
        """What `init` is given: the run's project, what a subclass has `chosen`, the known run; the user's win."""
        keyword, _ = self.known_by
        known = {} if run.identity is None else {keyword: run.identity.get(keyword), "resume": "allow"}
        return {"project": run.project.replace("/", "-")} | chosen | known | self._kwargs

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config."""
        self._run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row of values."""
        self._log_row(dict(values), step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images."""
        shown = {name: [without_axis(each) for each in pictures(images, name)] for name, images in values.items()}
        self._log_row({name: list(map(self._package.Image, each)) for name, each in shown.items()}, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact of type "file", or of `type=`."""
        self._run.log_artifact(str(path), **{"name": re.sub(r"[^\w\-.]", "_", name), "type": "file"} | kwargs)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self._run.log(row, **{"step": step} | kwargs)
