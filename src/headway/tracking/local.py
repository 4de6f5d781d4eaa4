"""Trackers that write here: TensorBoard, MLflow, Aim, DVCLive and Trackio."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headway.tracking.base import PackageAdapter, RowAdapter, TrackedRun
from headway.tracking.feed import flatten, is_loggable
from headway.tracking.pictures import Picture, file_name, in_colour, numbered, pictures, without_axis, write_png
from headway.tracking.runlog import leaves


class TensorBoardAdapter(PackageAdapter):
    """Writes TensorBoard's event files beside the run's log, through torch's SummaryWriter.

    Args:
        kwargs: for `torch.utils.tensorboard.SummaryWriter`; `log_dir` is the run's folder where it is not given.
    """

    name = "tensorboard"
    installed_by = "headway[trackers]"
    ended_by = "close"
    requires_logging_directory = True
    writer = PackageAdapter.tracker

    def begin(self, run: TrackedRun) -> None:
        """Open an event file; what the folder has from an earlier process stays."""
        from torch.utils.tensorboard import SummaryWriter

        self._run = SummaryWriter(**self._kwargs | {"log_dir": str(self._kwargs.get("log_dir", run.folder))})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as hyper-parameters, and readable as a text."""
        flat = {name: each if is_loggable(each) else json.dumps(each) for name, each in leaves(values)}
        self._run.add_hparams(flat, {}, run_name=".")
        self._run.add_text("config", f"```\n{json.dumps(values, indent=2, ensure_ascii=False)}\n```")
        self._run.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as texts; nested mappings of one name as a group of scalars."""
        super().log(flatten(values), step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.add_text(name, value, step, **kwargs)
        elif is_loggable(value):
            self._run.add_scalar(name, value, step, **kwargs)

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        self._run.add_image(name + part, in_colour(image), step, dataformats="HWC", **kwargs)

    def rewind(self, step: int) -> None:
        """The next event file says from which step on the former ones do not count."""
        self._run.close()
        self._run.purge_step = step + 1

    def flush(self) -> None:
        """Write what is queued."""
        self._run.flush()


class MLflowAdapter(PackageAdapter):
    """Logs to MLflow; the run is MLflow's active one, so that `mlflow.log_param` and the like go into it too.

    Args:
        tracking_uri: where; None: as MLflow is set (MLFLOW_TRACKING_URI, or a database in the working folder).
        experiment_name: None: the project's name.
        run_id: a run to go on with; None: the one that the run's log knows, or a new one.
        kwargs: for `mlflow.start_run`: run_name, tags, description, nested.
    """

    name = "mlflow"
    installed_by = "headway[trackers]"
    known_by = ("run_id", "info.run_id")
    active_run = PackageAdapter.tracker

    def __init__(
        self,
        tracking_uri: str | Path | None = None,
        experiment_name: str | None = None,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._uri, self._experiment, self._run_id = tracking_uri, experiment_name, run_id

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with the known one; a run that the script has made active is used as it is."""
        if self._uri is not None:
            self._package.set_tracking_uri(str(self._uri))
        self._run = self._package.active_run()
        self._is_own = self._run is None or bool(self._kwargs.get("nested"))
        if self._is_own:
            self._package.set_experiment(self._experiment or run.project)
            run_id = self._run_id or (run.identity or {}).get("run_id")
            self._run = self._package.start_run(run_id=run_id, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters; MLflow never changes one, so what differs after a restart becomes a tag."""
        before = self._package.get_run(self._run.info.run_id).data.params
        texts = {
            _allowed(name): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:500]
            for name, value in leaves(values)
        }
        new = [(name, text) for name, text in texts.items() if name not in before]
        for first in range(0, len(new), 100):  # as many as one call takes
            self._package.log_params(dict(new[first : first + 100]))
        changed = {f"{name} after restart": text for name, text in texts.items() if before.get(name, text) != text}
        if changed:
            self._package.set_tags(changed)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, texts as tags."""
        texts = {_allowed(name): value for name, value in values.items() if isinstance(value, str)}
        numbers = {_allowed(name): float(value) for name, value in values.items() if not isinstance(value, str)}
        if numbers:
            self._package.log_metrics(numbers, **{"step": step, "run_id": self._run.info.run_id} | kwargs)
        if texts:
            self._package.set_tags(texts)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """PNG files under `images/`."""
        with tempfile.TemporaryDirectory() as folder:
            for name, part, image in numbered(values):
                write_png(Path(folder, file_name(name, part, step)), image)
            self._package.log_artifacts(folder, "images", run_id=self._run.info.run_id)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or a folder under its name."""
        if path.is_dir():
            self._package.log_artifacts(str(path), name, run_id=self._run.info.run_id)
        else:
            self._package.log_artifact(str(path), run_id=self._run.info.run_id, **kwargs)

    def finish(self) -> None:
        """End the run, unless it is the script's own."""
        if self._is_own:
            self._package.end_run()


class AimAdapter(PackageAdapter):
    """Logs to Aim: a run in the repository in the logging folder.

    Args:
        kwargs: for `aim.Run`; `repo` is the logging folder, which all its projects share, `experiment` the project's name, and
            after a restart `run_hash` the known run's, where they are not given.
    """

    name = "aim"
    known_by = ("run_hash", "hash")
    ended_by = "close"
    requires_logging_directory = True
    writer = PackageAdapter.tracker

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        chosen: dict[str, Any] = {"experiment": run.project}
        if run.folder is not None:
            repo = run.folder.parents[len(PurePosixPath(run.project).parts) - 1]
            repo.mkdir(parents=True, exist_ok=True)
            chosen["repo"] = str(repo)
        if run.identity is not None:
            chosen["run_hash"] = run.identity.get("run_hash")
        self._run = self._package.Run(**chosen | self._kwargs)
        self._run.name = run.project

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as `hparams`."""
        self._run["hparams"] = values

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        kept = self._package.Text(value) if isinstance(value, str) else value
        self._run.track(kept, **{"name": name, "step": step} | kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Images under their names."""
        for name, images in values.items():
            several = [self._package.Image(without_axis(image)) for image in pictures(images, name)]
            self._log_value(name, several[0] if len(several) == 1 else several, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder, copied into the repository unless the run stores artifacts elsewhere."""
        if self._run.artifacts_uri is None:
            self._run.set_artifacts_uri((Path(self._run.repo.path) / "artifacts").as_uri())
        keep = self._run.log_artifacts if path.is_dir() else self._run.log_artifact
        keep(str(path), name, **kwargs)


class DVCLiveAdapter(PackageAdapter):
    """Logs to DVCLive: plain files, which DVC compares between commits.

    Args:
        live: a `dvclive.Live` of your own; None: one is made.
        kwargs: for `dvclive.Live`; `dir` is `dvclive` in the run's folder, and after a restart `resume` is True, where they are
            not given.
    """

    name = "dvclive"
    ended_by = "end"
    live = PackageAdapter.tracker

    def __init__(self, live: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._given = self._run = live

    @property
    def identity(self) -> dict[str, Any] | None:
        """The folder of its files."""
        return None if self._run is None else {"dir": str(Path(self._run.dir).absolute())}

    def begin(self, run: TrackedRun) -> None:
        """Open the folder, or continue in the known one."""
        if self._given is not None:
            return
        chosen = {} if run.folder is None else {"dir": str(run.folder / "dvclive")}
        known = {} if run.identity is None else {"dir": run.identity.get("dir"), "resume": True}
        self._run = self._package.Live(**chosen | known | self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters; DVCLive cannot store None."""
        self._run.log_params(_without_none(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; text goes to the summary, the only place DVCLive has for it."""
        if step is not None:
            self._run.step = step
        super().log(values, step, **kwargs)
        self._run.next_step()

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.summary[name] = value
        else:
            self._run.log_metric(name, value, **kwargs)

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        """Images in `plots/images`, each with its step in its name."""
        self._run.log_image(file_name(name, part, step), without_axis(image), **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder, tracked by DVC; without a DVC repository it stays in place, and DVCLive warns."""
        self._run.log_artifact(str(path), **kwargs)


class TrackioAdapter(RowAdapter):
    """Logs to Trackio, into the database of TRACKIO_DIR or Trackio's own default.

    Args:
        kwargs: for `trackio.init`; `project` is the run's, and after a restart `name` the known one's, where they are not given.
    """

    name = "trackio"
    known_by = ("name", "name")

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one; its link is logged, and no page opens in a notebook."""
        self._run = self._package.init(**self._choose_arguments(run, embed=False))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config; it is sent with the first values."""
        # `_` at the beginning is Trackio's own.
        self._run.config.update({name.lstrip("_"): json.loads(json.dumps(value)) for name, value in values.items()})

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images, numbered if one name has several."""
        images = {name + part: self._package.Image(in_colour(image)) for name, part, image in numbered(values)}
        self._log_row(images, step, **kwargs)


def _allowed(name: str) -> str:
    """The name without what MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in kept.items()}
