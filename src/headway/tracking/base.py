"""What a tracker is: the protocol that the built-in ones follow, and the base of a user's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from headway.common import env
from headway.config.launch import Spelled
from headway.runtime import process
from headway.tracking.pictures import Picture


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
            nested mappings, tensors and None.
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
