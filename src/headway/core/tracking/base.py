"""Base class `Tracker` of all trackers, and `LoggerType`, the names of trackers for `log_with=`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from headway.common import env
from headway.core.config.string_enums import StringEnum
from headway.core.runtime import process
from headway.core.tracking.pictures import Picture


class LoggerType(StringEnum):
    """Names of trackers for `Accelerator(log_with=...)`, such as `LoggerType.TENSORBOARD`.

    The strings, such as "tensorboard", are accepted, too. ALL selects the trackers whose packages are installed.
    """

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


TAKES = ("numbers", "objects", "given")
"""Allowed values of `Tracker.takes`."""


@dataclass(frozen=True)
class TrackedRun:
    """Name, folder and identity of a run, passed to a tracker when the run starts.

    Attributes:
        project: Name of the run, as passed to `init_trackers`.
        folder: Folder for the run's files, `<logging_dir>/<project_name>`; None without a logging_dir.
        identity: Value of the tracker's `identity` in an earlier process, if its run is continued; None for a new run.
    """

    project: str
    folder: Path | None = None
    identity: Mapping[str, Any] | None = None


class Tracker:
    """Base class for trackers. Subclass it to add a tracker, and pass an instance to `Accelerator(log_with=...)`.

    A subclass must define `name`, `store_init_configuration` and `log`. Everything else has a default. An exception in
    a tracker is logged as a warning and never reaches the training loop. After three failures in a row the tracker is
    no longer called. `GeneralTracker` is another name of this class.

    Example::

        class PrintTracker(Tracker):
            name = "print"

            def store_init_configuration(self, values):
                print(values)

            def log(self, values, step=None, **kwargs):
                print(step, values)

        accelerator = Accelerator(log_with=PrintTracker())

    Attributes:
        name: Name of the tracker for `get_tracker`.
        requires_logging_directory: Whether the tracker writes files, so that the Accelerator needs a `project_dir` or
            `logging_dir`. Default: False.
        main_process_only: Whether the tracker is called on rank 0 only. False: every rank calls its own tracker.
            Default: True.
        holds_back: Maximum number of seconds for which the package buffers values, even after `flush`. These values are
            lost if the process is killed. If the run then continues, the values of the last `holds_back` seconds are
            logged again. Default: 0.
        takes: Values that `log` accepts. "numbers": numbers and strings. "objects": in addition, objects of any type.
            "given": the values exactly as the script passes them, including nested mappings, tensors and None. The step
            is then None if the script passes none. Default: "objects".
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True
    holds_back: float = 0.0
    takes: str = "objects"

    @property
    def tracker(self) -> Any:
        """Object that `get_tracker(name, unwrap=True)` returns, such as the run object of another package."""
        return self

    @property
    def identity(self) -> dict[str, Any] | None:
        """JSON values with which the tracker can continue this run after a restart; None if it needs none."""
        return None

    def begin(self, run: TrackedRun) -> None:
        """Start a run. The default calls `start()`.

        Override this method if the tracker needs the run's name, folder or identity. It can be called again after `finish`,
        for another run in the same process.

        Args:
            run: Name, folder and identity of the run.
        """
        self.start()

    def start(self) -> None:
        """Start a run. `Accelerator.init_trackers` calls it through `begin`. The default does nothing.

        Override this instead of `begin` if the tracker does not need the run's name, folder and identity.
        """

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: JSON values, possibly nested.
        """
        raise NotImplementedError(f"{type(self).__name__} needs store_init_configuration(values)")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step: numbers, strings, and other objects (see `takes`).

        Args:
            values: Values by name, not nested unless `takes` is "given".
            step: Number of optimizer updates, or the step that the script passed to `accelerator.log`. None if `takes`
                is "given" and the script passed none.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs log(values, step=None, **kwargs)")

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log images. The default does nothing, because the run log already contains them.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C], where C is 1, 3 or 4.
            step: Number of optimizer updates, or the step that the script passed. Default: None, for images without a
                step.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file or a folder. The default does nothing, because the run log already contains its path.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            step: Number of optimizer updates, or the step that the script passed. Default: None, for an artifact
                without a step.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """

    def log_event(self, name: str, details: Mapping[str, Any], step: int | None = None) -> None:
        """Log a run event, such as "checkpoint", "resumed" or "out_of_memory". The default does nothing.

        This method may be called from any thread.

        Args:
            name: Kind of event.
            details: Details of the event, as JSON values.
            step: Number of optimizer updates at which the event occurred. Default: None, if unknown.
        """

    def rewind(self, step: int) -> None:
        """Discard values logged for steps after `step`, because the run was resumed at that step.

        The default does nothing.

        Args:
            step: Number of optimizer updates of the checkpoint that was loaded.
        """

    def flush(self) -> None:
        """Write buffered values to disk. The default does nothing.

        It is called after a checkpoint, on a preemption, and if the process exits without `finish`.
        """

    def finish(self) -> None:
        """End the run. The default does nothing."""


@dataclass(frozen=True)
class TrackerMaker:
    """Factory for a tracker that is created when a run starts. It can be passed to `log_with` instead of a `Tracker`.

    Attributes:
        name: Name of the tracker.
        make: Function that creates the tracker. It gets the tracker's entry in `init_kwargs` as keyword arguments.
        requires_logging_directory: Whether the tracker writes files, so that the Accelerator needs a `project_dir` or
            `logging_dir`.
    """

    name: str
    make: Callable[..., Tracker]
    requires_logging_directory: bool = False


GeneralTracker = Tracker


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of a `Tracker` so that it runs on rank 0 only, and returns None on other ranks.

    The decorator has an effect only if the tracker's `main_process_only` is True. For other functions, use
    `Accelerator.on_main_process`.

    Args:
        function: Method of a tracker.
    """

    @wraps(function)
    def call_on_main_process(self: Tracker, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not _is_main():
            return None
        return function(self, *args, **kwargs)

    return call_on_main_process


def _is_main() -> bool:
    """Whether this is rank 0, also after the process group has ended."""
    # Trackers end after the process group. process.current() would start a new one, and wait for the other ranks
    # forever.
    return process.current().is_main_process if process.is_started() else env.get_rank() == 0


class BlankTracker:
    """Placeholder that `get_tracker` returns on a rank without the tracker.

    It is falsy. Every attribute of it is the placeholder itself. Calling it does nothing and returns the placeholder.
    """

    def __getattr__(self, name: str) -> "BlankTracker":
        if name.startswith("__"):  # looked up by copy and pickle
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "BlankTracker":
        return self

    def __bool__(self) -> bool:
        return False
