"""Accelerate's tracker classes: Headway's trackers behind Accelerate's constructors, and its table of names."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.common import env
from headway.common.optional import available
from headway.compat.accelerate.launching.environment import str_to_bool
from headway.errors import ConfigError
from headway.log import get_logger
from headway.tracking import base
from headway.tracking.base import LoggerType, TrackedRun, Tracker, TrackerMaker, on_main_process
from headway.tracking.local import AimAdapter, DVCLiveAdapter, MLflowAdapter, TensorBoardAdapter, TrackioAdapter
from headway.tracking.services import ClearMLAdapter, CometAdapter, SwanLabAdapter, WandbAdapter, title_and_series

log = get_logger(__name__)

_UNSET: Any = object()


class GeneralTracker(Tracker):
    """The base of a script's own trackers: `name`, `requires_logging_directory` and `tracker` are required, the rest is not.

    Args:
        _blank: check nothing.

    Raises:
        NotImplementedError: one of the three is missing.
    """

    takes = "given"

    def __init__(self, _blank: bool = False) -> None:
        own = [kind for kind in type(self).__mro__ if kind not in (GeneralTracker, Tracker, object)]
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [each for each in needed if not any(each in vars(kind) for kind in own)]
        if missing and not _blank:
            raise NotImplementedError(f"the tracker {type(self).__name__} does not define {', '.join(missing)}")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration. Default: nothing."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one step. Default: nothing."""


class _Named(Tracker if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mixed in before a tracker of Headway's: the run's name may come with the constructor, and `start` begins the run."""

    run_name: str | None = None
    logging_dir: Any = None

    @on_main_process
    def start(self) -> None:
        """Begin the run without an Accelerator."""
        self.begin(TrackedRun(self.run_name or ""))

    def begin(self, run: TrackedRun) -> None:
        """Begin it under its own name, in its own folder."""
        project = self.run_name or run.project
        folder = run.folder if self.logging_dir is None else Path(self.logging_dir).absolute() / project
        super().begin(replace(run, project=project, folder=folder))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration, on the main process."""
        super().store_init_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of one step, on the main process."""
        super().log(values, step, **kwargs)

    @on_main_process
    def log_images(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        """Keep images, on the main process: arrays or PIL images by name."""
        super().log_images(values, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run, on the main process."""
        super().finish()


class _OfProject(_Named):
    """Mixed in where the run's name always comes with the constructor."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run_name = run_name


class TensorBoardTracker(_OfProject, TensorBoardAdapter, GeneralTracker):
    """TensorBoard's, in `logging_dir/run_name`; other arguments are for SummaryWriter."""

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir


class WandBTracker(_OfProject, WandbAdapter, GeneralTracker):
    """W&B's, of the project `run_name`; other arguments are for `wandb.init`."""

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
        """Keep a table, from columns and rows or from a dataframe."""
        self.log({table_name: self._package.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)


class TrackioTracker(_OfProject, TrackioAdapter, GeneralTracker):
    """Trackio's, of the project `run_name`; other arguments are for `trackio.init`."""


class CometMLTracker(_OfProject, CometAdapter, GeneralTracker):
    """Comet's, of the project `run_name`; other arguments are for `comet_ml.start`."""


class AimTracker(_OfProject, AimAdapter, GeneralTracker):
    """Aim's, in the repository `logging_dir`; other arguments are for `aim.Run`."""

    def __init__(self, run_name: str, logging_dir: Any = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir


class MLflowTracker(_Named, MLflowAdapter, GeneralTracker):
    """MLflow's. The variables MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN win over arguments.

    Args:
        experiment_name: the experiment's.
        logging_dir: where artifacts of a new experiment go; None: as MLflow is set.
        run_id: a run to go on with.
        tags: of the run: a dict, or its JSON.
        nested_run: below the active run.
        run_name: of a new run.
        description: of the run.
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

        told = env.get("MLFLOW_TAGS") or tags
        nested = env.get("MLFLOW_NESTED_RUN")
        options = {
            "tags": json.loads(told) if isinstance(told, str) else told,
            "nested": nested_run if nested is None else bool(str_to_bool(nested)),
            "run_name": run_name,
            "description": description,
        }
        given: dict[str, Any] = {name: value for name, value in options.items() if value}
        experiment = env.get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        super().__init__(
            experiment_name=experiment, run_id=env.get("MLFLOW_RUN_ID") or run_id, **given | kwargs
        )  # fmt: skip
        self._artifacts = logging_dir

    def begin(self, run: TrackedRun) -> None:
        """Start a run, in a new experiment with the given place for artifacts where there is none of that name."""
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
        """Keep a file, in the folder `artifact_path` of the run."""
        if step is not _UNSET:  # the Accelerator's own call, with the artifact's name
            super().log_artifact(Path(local_path), artifact_path or Path(local_path).name, step, **kwargs)
        else:
            self._package.log_artifact(str(local_path), artifact_path, run_id=self._run.info.run_id)

    @on_main_process
    def log_artifacts(self, local_dir: Any, artifact_path: str | None = None) -> None:
        """Keep all files of a folder."""
        self._package.log_artifacts(str(local_dir), artifact_path, run_id=self._run.info.run_id)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Keep a figure of matplotlib or plotly."""
        self._package.log_figure(figure, artifact_file, **save_kwargs)


class ClearMLTracker(_Named, ClearMLAdapter, GeneralTracker):
    """ClearML's; project and task are called `run_name` unless told otherwise; other arguments are for `Task.init`."""

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
        """Keep a table, from rows (the first being the columns where none are given) or from a dataframe.

        Raises:
            ValueError: neither.
        """
        if dataframe is None and data is None:
            raise ConfigError("log_table() got neither data= nor dataframe=; give one of them")
        rows = dataframe if dataframe is not None else [*([list(columns)] if columns else []), *(data or ())]
        title, series = title_and_series(table_name)
        self._run.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **kwargs)


class DVCLiveTracker(_Named, DVCLiveAdapter, GeneralTracker):
    """DVCLive's; `run_name` is ignored, as in Accelerate; other arguments are for `dvclive.Live`."""

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(live, **kwargs)
        self.run_name = run_name


class SwanLabTracker(_OfProject, SwanLabAdapter, GeneralTracker):
    """SwanLab's, of the project `run_name`; other arguments are for `swanlab.init`."""


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
    """Let `log_with` find a class of trackers by its `name`; it is made with the project's name (and the logging folder).

    Raises:
        ConfigError: not a class of trackers, or one without a name or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, Tracker)):
        raise ConfigError(f"register_tracker_class({tracker_class!r}): a subclass of GeneralTracker is needed")
    name = getattr(tracker_class, "name", None)
    own = [kind for kind in tracker_class.__mro__ if kind not in (GeneralTracker, Tracker, object)]
    if not name or not any("requires_logging_directory" in vars(kind) for kind in own):
        raise ConfigError(
            f"register_tracker_class({tracker_class.__name__}): the class needs a name and requires_logging_directory"
        )
    if name in LOGGER_TYPE_TO_CLASS:
        log.warning("the tracker %s was registered before; %s takes its place", name, tracker_class.__name__)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Accelerate's trackers whose packages are installed."""
    return [each for each in LoggerType if each.value in LOGGER_TYPE_TO_CLASS and available(each.value)]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """The usable ones of `log_with`, each once: names of installed or registered trackers, and instances.

    Raises:
        ConfigError: an unknown name, or a tracker that needs a logging_dir where there is none.
    """
    several = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    if any(str(each) == LoggerType.ALL.value for each in several):
        return [each for each in several if isinstance(each, Tracker)] + list(get_available_trackers())
    found: list[Any] = []
    for each in several:
        if isinstance(each, Tracker):
            found.append(each)
            continue
        name = str(each)
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"log_with={each!r}; allowed: all, {', '.join(LOGGER_TYPE_TO_CLASS)}, or a tracker")
        if _is_missing(each):
            continue
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            raise ConfigError(f"log_with={name!r} needs a logging_dir; there is none")
        kept = LoggerType(name) if name in {kind.value for kind in LoggerType} else each
        if kept not in found:
            found.append(kept)
    return found


def makers(log_with: Any, project: Callable[[], str], logging_dir: Callable[[], Any]) -> Any:
    """`log_with` with Accelerate's classes in place of names, each created as in Accelerate when a run starts.

    Args:
        log_with: as the Accelerator takes it.
        project: gives the project's name once a run begins.
        logging_dir: gives the logging folder.
    """
    if log_with is None:
        return None
    several = log_with if isinstance(log_with, list | tuple | set) else [log_with]
    return [_maker(each, project, logging_dir) for each in several if not _is_missing(each)]


def _is_missing(each: Any) -> bool:
    """Is it the name of a tracker whose package is not installed? Said once."""
    name = str(each)
    is_built_in = name in LOGGER_TYPE_TO_CLASS and name in {kind.value for kind in LoggerType}
    is_missing = is_built_in and not isinstance(each, Tracker) and not available(name)
    if is_missing:
        log.warning_once("log_with leaves %s out: it is not installed", name)
    return is_missing


def _maker(each: Any, project: Callable[[], str], logging_dir: Callable[[], Any]) -> Any:
    name = str(each)
    if isinstance(each, Tracker) or name not in LOGGER_TYPE_TO_CLASS:
        return each
    kind = LOGGER_TYPE_TO_CLASS[name]

    def make(**options: Any) -> Tracker:
        places = (project(), logging_dir()) if kind.requires_logging_directory else (project(),)
        made = kind(*places, **options)
        if not isinstance(made, base.Tracker):
            raise ConfigError(f"the tracker {name!r} is a {type(made).__name__}; a GeneralTracker is needed")
        return made

    return TrackerMaker(name, make, kind.requires_logging_directory)
