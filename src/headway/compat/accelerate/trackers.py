"""Accelerate's tracker classes: Headway's trackers with Accelerate's constructors."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.common import env
from headway.common.object_path import expand_home
from headway.common.optional import is_available
from headway.compat.accelerate.launching.environment import str_to_bool
from headway.core.tracking import base
from headway.core.tracking.base import LoggerType, TrackedRun, Tracker, TrackerMaker, on_main_process
from headway.core.tracking.local import AimAdapter, DVCLiveAdapter, MLflowAdapter, TensorBoardAdapter, TrackioAdapter
from headway.core.tracking.services import (
    ClearMLAdapter,
    CometAdapter,
    SwanLabAdapter,
    WandbAdapter,
    split_title_and_series,
)
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_UNSET: Any = object()


class GeneralTracker(Tracker):
    """Base class of a script's own trackers. Subclasses must define `name`, `requires_logging_directory` and `tracker`.

    Args:
        _blank: Whether to skip the check that the three attributes are defined. Default: False.

    Raises:
        NotImplementedError: If one of the three attributes is not defined.
    """

    takes = "given"

    def __init__(self, _blank: bool = False) -> None:
        # The base classes have defaults of these attributes, which do not count.
        subclasses = [kind for kind in type(self).__mro__ if kind not in (GeneralTracker, Tracker, object)]
        required = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in required if not any(name in vars(kind) for kind in subclasses)]
        if missing and not _blank:
            raise NotImplementedError(f"the tracker {type(self).__name__} does not define {', '.join(missing)}")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's configuration. The base class does nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step. The base class does nothing."""


class _AccelerateInterface(Tracker if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixin that gives Headway's trackers the interface of Accelerate's trackers.

    The run's name is passed to the constructor, not to `start`. The methods only have an effect on the main process.
    """

    run_name: str | None = None
    logging_dir: Any = None

    @on_main_process
    def start(self) -> None:
        """Start a run in the tracker under the name that was passed to the constructor, without an Accelerator."""
        self.begin(TrackedRun(self.run_name or ""))

    def begin(self, run: TrackedRun) -> None:
        """Start a run in the tracker, with the name and the logging directory that were passed to the constructor.

        If one of the two was not passed, the Accelerator's value is used.

        Args:
            run: Name, directory and settings of the run, as the Accelerator defines them.
        """
        project = self.run_name or run.project
        folder = run.folder if self.logging_dir is None else Path(expand_home(self.logging_dir)).absolute() / project
        super().begin(replace(run, project=project, folder=folder))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's configuration, on the main process only."""
        super().store_init_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step, on the main process only."""
        super().log(values, step, **kwargs)

    @on_main_process
    def log_images(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log images on the main process only: `values` maps each name to a sequence of arrays or PIL images."""
        super().log_images(values, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the tracker's run, on the main process only."""
        super().finish()


class _ProjectTracker(_AccelerateInterface):
    """Mixin for trackers whose constructor requires the run's name.

    Args:
        run_name: Name of the run or project.
        kwargs: Keyword arguments of the next constructor in the method resolution order.
    """

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run_name = run_name


class TensorBoardTracker(_ProjectTracker, TensorBoardAdapter, GeneralTracker):
    """TensorBoard tracker that writes to the folder `logging_dir/run_name`.

    Other keyword arguments are passed to SummaryWriter.
    """

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir


class WandBTracker(_ProjectTracker, WandbAdapter, GeneralTracker):
    """Weights & Biases tracker for the project `run_name`. Other arguments are passed to `wandb.init`."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table from columns and rows, or from a dataframe, on the main process only.

        Args:
            table_name: Name of the table.
            columns: Names of the columns. None (the default): not given.
            data: Rows of values. None (the default): not given.
            dataframe: Dataframe, instead of columns and rows. None (the default): not given.
            step: Number of the step. None: the table is logged without one.
            kwargs: Other keyword arguments of `log`.
        """
        self.log({table_name: self._package.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)


class TrackioTracker(_ProjectTracker, TrackioAdapter, GeneralTracker):
    """Trackio tracker for the project `run_name`. Other arguments are passed to `trackio.init`."""


class CometMLTracker(_ProjectTracker, CometAdapter, GeneralTracker):
    """Comet tracker for the project `run_name`. Other arguments are passed to `comet_ml.start`."""


class AimTracker(_ProjectTracker, AimAdapter, GeneralTracker):
    """Aim tracker with its repository in `logging_dir`. Other arguments are passed to `aim.Run`."""

    def __init__(self, run_name: str, logging_dir: Any = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir


class MLflowTracker(_AccelerateInterface, MLflowAdapter, GeneralTracker):
    """Tracker that logs runs to MLflow, with the constructor arguments of Accelerate's class.

    The environment variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN override the
    corresponding arguments.

    Args:
        experiment_name: Name of the experiment. None: the name that was passed to `init_trackers`.
        logging_dir: Location of artifacts for a new experiment. None: MLflow's setting.
        run_id: ID of a run to continue. None: a new run, or that of the run log if the Accelerator's run continues.
        tags: Tags of the run, as a dict or as JSON text. None: no tags.
        nested_run: Whether the run is nested in the active run. Default: False.
        run_name: Name of a new run. None: a name that MLflow chooses.
        description: Description of the run. None: no description.
        kwargs: Other keyword arguments of `mlflow.start_run`, or `tracking_uri`.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: Any = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        **kwargs: Any,
    ) -> None:
        import json

        run_tags = env.get("MLFLOW_TAGS") or tags
        nested_text = env.get("MLFLOW_NESTED_RUN")
        options = {
            "tags": json.loads(run_tags) if isinstance(run_tags, str) else run_tags,
            "nested": nested_run if nested_text is None else bool(str_to_bool(nested_text)),
            "run_name": run_name,
            "description": description,
        }
        start_options: dict[str, Any] = {name: value for name, value in options.items() if value}
        chosen_experiment = env.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        super().__init__(
            experiment_name=chosen_experiment, run_id=env.get("MLFLOW_RUN_ID") or run_id, **start_options | kwargs
        )  # fmt: skip
        self._artifacts = logging_dir

    def begin(self, run: TrackedRun) -> None:
        """Start a run in MLflow. If its named experiment does not exist, create it with the given artifact location."""
        if self._artifacts is not None and self._experiment:
            if self._uri is not None:
                self._package.set_tracking_uri(str(self._uri))
            if self._package.get_experiment_by_name(self._experiment) is None:
                self._package.create_experiment(self._experiment, artifact_location=str(self._artifacts))
        super().begin(run)

    @on_main_process
    def log_artifact(
        self, local_path: Any, artifact_path: str | None = None, step: Any = _UNSET, **kwargs: Any
    ) -> None:
        """Upload a file to the run's directory `artifact_path`.

        Args:
            local_path: Path of the file.
            artifact_path: Directory in the run. None: the root of the run's artifacts.
            step: Number of the step. Only `Accelerator.log_artifact` passes it. `artifact_path` is then the name of the
                artifact, not a directory.
            kwargs: Other arguments that `Accelerator.log_artifact` passes. Ignored without `step`.
        """
        if step is not _UNSET:  # called by Accelerator.log_artifact, which passes the artifact's name
            super().log_artifact(Path(local_path), artifact_path or Path(local_path).name, step, **kwargs)
        else:
            self._package.log_artifact(str(local_path), artifact_path, run_id=self._run.info.run_id)

    @on_main_process
    def log_artifacts(self, local_dir: Any, artifact_path: str | None = None) -> None:
        """Upload all files of a local directory to the run's directory `artifact_path`. None: the root."""
        self._package.log_artifacts(str(local_dir), artifact_path, run_id=self._run.info.run_id)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Upload a matplotlib or plotly figure to the run as the file `artifact_file`."""
        self._package.log_figure(figure, artifact_file, **save_kwargs)


class ClearMLTracker(_AccelerateInterface, ClearMLAdapter, GeneralTracker):
    """ClearML tracker. By default, the project and the task are both named `run_name`.

    Other keyword arguments are passed to `Task.init`.
    """

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run_name = run_name

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table from rows or from a dataframe, on the main process only.

        Args:
            table_name: Name of the table.
            columns: Names of the columns. None: the first row is the header.
            data: Rows of values. None (the default): not given.
            dataframe: Dataframe, instead of columns and rows. None (the default): not given.
            step: Number of the step. None: ClearML's default.
            kwargs: Other arguments of ClearML's `report_table`.

        Raises:
            ConfigError: If neither rows nor a dataframe is given.
        """
        if dataframe is None and data is None:
            raise ConfigError("log_table() got neither data= nor dataframe=; give one of them")
        rows = dataframe
        if dataframe is None:
            header = [list(columns)] if columns else []
            rows = [*header, *(data or ())]
        title, series = split_title_and_series(table_name)
        self._run.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **kwargs)


class DVCLiveTracker(_AccelerateInterface, DVCLiveAdapter, GeneralTracker):
    """DVCLive tracker. `run_name` is ignored, as in Accelerate.

    Args:
        run_name: Ignored.
        live: `dvclive.Live` to log to. None: a new one.
        kwargs: Arguments for a new `dvclive.Live`.
    """

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(live, **kwargs)
        self.run_name = run_name


class SwanLabTracker(_ProjectTracker, SwanLabAdapter, GeneralTracker):
    """SwanLab tracker for the project `run_name`. Other arguments are passed to `swanlab.init`."""


LOGGER_TYPE_TO_CLASS: dict[str, type[Any]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Register a tracker class under its `name`, so that `log_with` can refer to it.

    The Accelerator creates instances with the project's name, and with the logging directory if the class requires one.
    A class that is already registered under this name is replaced, with a warning.

    Raises:
        ConfigError: If `tracker_class` is not a subclass of `Tracker`, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, Tracker)):
        raise ConfigError(f"register_tracker_class({tracker_class!r}): a subclass of GeneralTracker is needed")
    name = getattr(tracker_class, "name", None)
    defining_classes = [kind for kind in tracker_class.__mro__ if kind not in (GeneralTracker, Tracker, object)]
    if not name or not any("requires_logging_directory" in vars(kind) for kind in defining_classes):
        raise ConfigError(
            f"register_tracker_class({tracker_class.__name__}): the class needs a name and requires_logging_directory"
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by {tracker_class}. This is especially "
            "significant when shadowing a built-in tracker.",
            UserWarning,
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Return the names of Accelerate's trackers whose packages are installed."""
    return [each for each in LoggerType if each.value in LOGGER_TYPE_TO_CLASS and is_available(each.value)]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """Return those trackers of `log_with` whose packages are installed. Names are returned without duplicates.

    Args:
        log_with: One or more trackers: names of built-in or registered trackers, "all", or instances. None: none.
        logging_dir: Logging directory. None: the name of a tracker that requires one raises `ConfigError`.

    Raises:
        ConfigError: If a name is unknown, or if a tracker requires a logging directory that is not given.
    """
    if log_with is None:
        return []
    requested = log_with if isinstance(log_with, list | tuple) else [log_with]
    if any(str(item) == LoggerType.ALL.value for item in requested):
        return [item for item in requested if isinstance(item, Tracker)] + list(get_available_trackers())
    trackers: list[Any] = []
    for item in requested:
        if isinstance(item, Tracker):
            trackers.append(item)
            continue
        name = str(item)
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"log_with={item!r}; allowed: all, {', '.join(LOGGER_TYPE_TO_CLASS)}, or a tracker")
        if _is_package_missing(item):
            continue
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            raise ConfigError(f"log_with={name!r} needs a logging_dir; there is none")
        tracker = LoggerType(name) if name in {kind.value for kind in LoggerType} else item
        if tracker not in trackers:
            trackers.append(tracker)
    return trackers


def replace_tracker_names(log_with: Any, project: Callable[[], str], logging_dir: Callable[[], Any]) -> Any:
    """Return the items of `log_with`, with each name replaced by a factory for Accelerate's tracker class of this name.

    Names of trackers that are not installed are left out. Instances and unknown names are kept, and None is returned
    unchanged. A factory creates its tracker when a run begins.

    Args:
        log_with: Trackers, as passed to the Accelerator.
        project: Function that returns the project's name. It is called when a run begins.
        logging_dir: Function that returns the logging directory. It is called when a run begins.
    """
    if log_with is None:
        return None
    requested = log_with if isinstance(log_with, list | tuple | set) else [log_with]
    trackers = [_make_tracker_choice(item, project, logging_dir) for item in requested if not _is_package_missing(item)]
    if requested and not trackers:
        warnings.warn(
            f"`log_with={log_with}` was passed but no supported trackers are currently installed.",
            UserWarning,
            stacklevel=3,
        )
    return trackers


def _is_package_missing(item: Any) -> bool:
    """Whether a value is the name of a tracker whose package is not installed. A warning is logged once per name."""
    name = str(item)
    is_built_in = name in LOGGER_TYPE_TO_CLASS and name in {kind.value for kind in LoggerType}
    is_missing = is_built_in and not isinstance(item, Tracker) and not is_available(name)
    if is_missing:
        log.warning_once("log_with leaves %s out: it is not installed", name)
    return is_missing


def _make_tracker_choice(item: Any, project: Callable[[], str], logging_dir: Callable[[], Any]) -> Any:
    """Return a factory for the tracker class that `item` names. Any other item is returned unchanged.

    Args:
        item: One item of `log_with`.
        project: Function that returns the project's name.
        logging_dir: Function that returns the logging directory.

    Raises:
        ConfigError: From the factory, if the registered class does not create a tracker.
    """
    name = str(item)
    if isinstance(item, Tracker) or name not in LOGGER_TYPE_TO_CLASS:
        return item
    tracker_class = LOGGER_TYPE_TO_CLASS[name]

    def make_tracker(**options: Any) -> Tracker:
        arguments = (project(), logging_dir()) if tracker_class.requires_logging_directory else (project(),)
        tracker = tracker_class(*arguments, **options)
        if not isinstance(tracker, base.Tracker):
            raise ConfigError(f"the tracker {name!r} is a {type(tracker).__name__}; a GeneralTracker is needed")
        return tracker

    return TrackerMaker(name, make_tracker, tracker_class.requires_logging_directory)
