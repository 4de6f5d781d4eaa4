"""What a tracker is: the base of a user's own and of other packages' trackers; and which ones `log_with=` asks for."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from headway.common import env
from headway.common.optional import available, require
from headway.config.launch import Spelled
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger
from headway.runtime import process
from headway.tracking.pictures import Picture, numbered, pictures, without_axis

log = get_logger(__name__)


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
        return {keyword: attrgetter(attribute)(self._run)}

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


# ---------------------------------------------------------------- from `log_with=` to trackers


GROUP = "headway.trackers"
"""The entry point group: a name, and a `Tracker` class that takes what `init_kwargs` gives."""

_ALWAYS = "jsonl"
_BUILT_IN = {
    "tensorboard": "local.TensorBoardAdapter",
    "wandb": "services.WandbAdapter",
    "mlflow": "local.MLflowAdapter",
    "comet_ml": "services.CometAdapter",
    "aim": "local.AimAdapter",
    "clearml": "services.ClearMLAdapter",
    "dvclive": "local.DVCLiveAdapter",
    "swanlab": "services.SwanLabAdapter",
    "trackio": "local.TrackioAdapter",
    "opentelemetry": "services.OpenTelemetryAdapter",
}
_MODULES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
"""What is imported, where it is not the tracker's name."""

Choice = Tracker | TrackerMaker
"""A user's own tracker, or what builds one when a run begins."""


def select_trackers(log_with: object, *, has_folder: bool, is_main: bool = True) -> list[Choice]:
    """The trackers that `log_with` asks for, each once.

    Args:
        log_with: a name, a `Tracker` or what makes one, a list of them, or None; "all": those that are installed.
        has_folder: is there a place for files?
        is_main: only rank 0 needs the packages.

    Raises:
        ConfigError: an unknown name, an object of another kind, or one that needs a folder where there is none.
        OptionalDependencyMissing: a package that was asked for by name is not installed.
    """
    chosen: dict[str, Choice] = {}
    for each in log_with if isinstance(log_with, list | tuple | set) else [_ALWAYS if log_with is None else log_with]:
        choices: list[Any] = []
        if isinstance(each, Tracker | TrackerMaker):
            choices = [each]
        elif (asked := _read_name(each)) == "all":
            choices = [maker for maker in _find_installed(has_folder, is_main) if maker.name not in chosen]
        elif asked != _ALWAYS:
            choices = [_make_by_name(asked, is_main)]
        for choice in choices:
            name = getattr(choice, "name", None)
            if not isinstance(name, str):
                raise ConfigError(f"the tracker {type(choice).__name__} needs a `name`: a text to find it by")
            if choice.requires_logging_directory and not has_folder:
                raise ConfigError(
                    f"log_with={name!r} writes files and needs a place: pass project_dir= to the Accelerator, or "
                    "project_config=ProjectConfiguration(logging_dir=...)"
                )
            chosen[name] = choice
    return list(chosen.values())


def _read_name(each: object) -> str:
    name = each.value if isinstance(each, Enum) else each
    if not isinstance(name, str):
        raise ConfigError(
            f"log_with={each!r} is no tracker; give a name ({', '.join(_names())}), 'all', a headway.Tracker, or a list of these"
        )
    return name.lower()


def _names() -> list[str]:
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=GROUP))})


def _make_by_name(name: str, is_main: bool) -> TrackerMaker:
    if name not in _names():
        near = get_close_matches(name, _names(), 1)
        raise ConfigError(
            f"log_with={name!r}: no such tracker{f' (did you mean {near[0]!r}?)' if near else ''}; allowed: "
            f"{', '.join(_names())}, 'all', or an instance of headway.Tracker"
        )
    maker = _load_maker(name)
    if is_main and name in _BUILT_IN and not available(_MODULES.get(name, name)):
        extra = getattr(maker.make, "installed_by", "")
        line = f"'{extra}'" if extra else name
        raise OptionalDependencyMissing(f"log_with={name!r} needs {name}, which is not installed: pip install {line}")
    return maker


def _load_maker(name: str) -> TrackerMaker:
    plugged = [each for each in entry_points(group=GROUP) if each.name == name]
    if plugged:
        kind = plugged[0].load()
    else:
        module, _, attribute = _BUILT_IN[name].partition(".")
        kind = getattr(import_module(f"headway.tracking.{module}"), attribute)
    return TrackerMaker(name, kind, getattr(kind, "requires_logging_directory", False))


def _find_installed(has_folder: bool, is_main: bool) -> list[TrackerMaker]:
    # Other packages bring OpenTelemetry along, and nobody listens.
    out = set() if env.get("OTEL_EXPORTER_OTLP_ENDPOINT") else {"opentelemetry"}
    fitting = [name for name in _names() if name not in _BUILT_IN or available(_MODULES.get(name, name))]
    found = [_load_maker(name) for name in fitting if name not in out]
    if not found and is_main:
        log.warning("log_with='all' found no tracker installed: pip install 'headway[trackers]'")
    for maker in found:
        if maker.requires_logging_directory and not has_folder:
            log.info("log_with='all' leaves %s out: it needs a logging_dir", maker.name)
    return [maker for maker in found if has_folder or not maker.requires_logging_directory]
