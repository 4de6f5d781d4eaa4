"""Trackers that write to this machine: TensorBoard, MLflow, Aim, DVCLive and Trackio."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headway.core.tracking.adapters import PackageAdapter, RowAdapter
from headway.core.tracking.base import TrackedRun
from headway.core.tracking.pictures import (
    ImageFileNames,
    Picture,
    convert_images,
    convert_to_color,
    drop_gray_axis,
    number_images,
    write_png,
)
from headway.core.tracking.runlog import list_leaves
from headway.core.tracking.values import flatten, is_loggable


class TensorBoardAdapter(PackageAdapter):
    """Tracker that writes TensorBoard event files next to the run log, with torch's SummaryWriter.

    Args:
        kwargs: Arguments for `torch.utils.tensorboard.SummaryWriter`. Default of `log_dir`: the run's folder.
    """

    name = "tensorboard"
    requirement = "headway[trackers]"
    end_method = "close"
    requires_logging_directory = True
    writer = PackageAdapter.tracker

    def begin(self, run: TrackedRun) -> None:
        """Open an event file. Files from earlier processes in the folder are kept."""
        from torch.utils.tensorboard import SummaryWriter

        self._run = SummaryWriter(**self._kwargs | {"log_dir": str(self._kwargs.get("log_dir", run.folder))})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, and as readable text."""
        flat = {name: each if is_loggable(each) else json.dumps(each) for name, each in list_leaves(values)}
        self._run.add_hparams(flat, {}, run_name=".")
        self._run.add_text("config", f"```\n{json.dumps(values, indent=2, ensure_ascii=False)}\n```")
        self._run.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, strings as text, and a nested mapping as a group of scalars.

        Args:
            values: Values by name, possibly nested.
            step: Number of optimizer updates, or the step that the script passed. Default: None, which TensorBoard
                shows as step 0.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        super().log(flatten(values), step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.add_text(name, value, step, **kwargs)
        elif is_loggable(value):
            self._run.add_scalar(name, value, step, **kwargs)

    def _log_image(self, name: str, suffix: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        self._run.add_image(name + suffix, convert_to_color(image), step, dataformats="HWC", **kwargs)

    def rewind(self, step: int) -> None:
        """Mark the values for steps after `step` in earlier event files as invalid.

        TensorBoard reads the mark from the next event file.
        """
        self._run.close()
        self._run.purge_step = step + 1

    def flush(self) -> None:
        """Write queued events to the file."""
        self._run.flush()


class MLflowAdapter(PackageAdapter):
    """Tracker for MLflow. Its run is MLflow's active run, so that `mlflow.log_param` and similar calls use it too.

    Args:
        tracking_uri: URI of the tracking store. Default: MLflow's setting (MLFLOW_TRACKING_URI, or a database in the
            working folder).
        experiment_name: Name of the experiment. Default: the project's name.
        run_id: ID of a run to continue. Default: the ID in the run log if the run continues, else a new run.
        kwargs: Arguments for `mlflow.start_run`: run_name, tags, description, nested.
    """

    name = "mlflow"
    requirement = "headway[trackers]"
    identity_names = ("run_id", "info.run_id")
    active_run = PackageAdapter.tracker

    def __init__(
        self,
        tracking_uri: str | Path | None = None,
        experiment_name: str | None = None,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._uri = tracking_uri
        self._experiment = experiment_name
        self._run_id = run_id
        self._image_file_names = ImageFileNames()

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies.

        If the script has already started an MLflow run, that run is used, unless `nested=True` was passed.

        Args:
            run: Name, folder and identity of the run.
        """
        if self._uri is not None:
            self._package.set_tracking_uri(str(self._uri))
        self._run = self._package.active_run()
        self._is_own = self._run is None or bool(self._kwargs.get("nested"))
        if self._is_own:
            self._package.set_experiment(self._experiment or run.project)
            run_id = self._run_id or (run.identity or {}).get("run_id")
            self._run = self._package.start_run(run_id=run_id, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters.

        MLflow cannot change a parameter, so a value that has changed after a restart becomes a tag.

        Args:
            values: JSON values, possibly nested.
        """
        stored = self._package.get_run(self._run.info.run_id).data.params
        texts = {
            _replace_forbidden(name): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:500]
            for name, value in list_leaves(values)
        }
        params = [self._package.entities.Param(name, text) for name, text in texts.items() if name not in stored]
        for start in range(0, len(params), 100):  # MLflow's limit on parameters per call
            self._package.MlflowClient().log_batch(self._run.info.run_id, params=params[start : start + 100])
        changed = {f"{name} after restart": text for name, text in texts.items() if stored.get(name, text) != text}
        if changed:
            self._set_tags(changed)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as tags.

        Args:
            values: Values by name, not nested.
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to MLflow.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        texts = {_replace_forbidden(name): value for name, value in values.items() if isinstance(value, str)}
        numbers = {
            _replace_forbidden(name): float(value) for name, value in values.items() if not isinstance(value, str)
        }
        if numbers:
            self._package.log_metrics(numbers, **{"step": step, "run_id": self._run.info.run_id} | kwargs)
        if texts:
            self._set_tags(texts)

    def _set_tags(self, texts: Mapping[str, str]) -> None:
        """Set tags of this tracker's own run."""
        # mlflow.set_tags() would set them in the active run, which can be a nested one, or start a run if none is active.
        tags = [self._package.entities.RunTag(name, text) for name, text in texts.items()]
        self._package.MlflowClient().log_batch(self._run.info.run_id, tags=tags)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log images as PNG files under `images/`.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Number of optimizer updates, or the step that the script passed. Default: None, for file names without
                a step.
            kwargs: Unused.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name, suffix, image in number_images(values):
                write_png(Path(folder, self._image_file_names.choose(name, suffix, step)), image)
            self._package.log_artifacts(folder, "images", run_id=self._run.info.run_id)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file, or a folder. The files of a folder are stored under `name`.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact. Unused for a file.
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`. Unused for a folder.
        """
        if path.is_dir():
            self._package.log_artifacts(str(path), name, run_id=self._run.info.run_id)
        else:
            self._package.log_artifact(str(path), run_id=self._run.info.run_id, **kwargs)

    def finish(self) -> None:
        """End the run, unless the script started or ended it itself. A run that the script has started stays active."""
        if not self._is_own:
            return
        run_id, active_run = self._run.info.run_id, self._package.active_run()
        if active_run is not None and active_run.info.run_id == run_id:
            self._package.end_run()
        elif self._package.get_run(run_id).info.status == "RUNNING":  # end_run() would end the active run
            self._package.MlflowClient().set_terminated(run_id)


class AimAdapter(PackageAdapter):
    """Tracker for Aim. By default, its repository is in the logging folder.

    Args:
        kwargs: Arguments for `aim.Run`. Default of `repo`: the logging folder, which all projects share. Default of
            `experiment`: the project's name. Default of `run_hash` after a restart: the hash of the run that continues.
    """

    name = "aim"
    identity_names = ("run_hash", "hash")
    end_method = "close"
    requires_logging_directory = True
    writer = PackageAdapter.tracker

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies."""
        arguments: dict[str, Any] = {"experiment": run.project}
        if run.folder is not None:
            # The logging folder: `run.folder` without the project's name, which can have several parts.
            repo = run.folder.parents[len(PurePosixPath(run.project).parts) - 1]
            repo.mkdir(parents=True, exist_ok=True)
            arguments["repo"] = str(repo)
        if run.identity is not None:
            arguments["run_hash"] = run.identity.get("run_hash")
        self._run = self._package.Run(**arguments | self._kwargs)
        self._run.name = run.project

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration under the key `hparams` of the Aim run."""
        self._run["hparams"] = values

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        tracked = self._package.Text(value) if isinstance(value, str) else value
        self._run.track(tracked, **{"name": name, "step": step} | kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log images under their names.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to Aim.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        for name, images in values.items():
            aim_images = [self._package.Image(drop_gray_axis(picture)) for picture in convert_images(images, name)]
            self._log_value(name, aim_images[0] if len(aim_images) == 1 else aim_images, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file or a folder.

        The content is copied into Aim's repository unless the run stores artifacts elsewhere.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        if self._run.artifacts_uri is None:
            self._run.set_artifacts_uri((Path(self._run.repo.path) / "artifacts").as_uri())
        log_path = self._run.log_artifacts if path.is_dir() else self._run.log_artifact
        log_path(str(path), name, **kwargs)


class DVCLiveAdapter(PackageAdapter):
    """Tracker for DVCLive, which writes plain files that DVC compares between commits.

    Args:
        live: `dvclive.Live` object that the script has created. `finish` ends it. Default: a new one is created from
            `kwargs`.
        kwargs: Arguments for `dvclive.Live`. Default of `dir`: `dvclive` in the run's folder. Default of `resume` after
            a restart: True.
    """

    name = "dvclive"
    end_method = "end"
    live = PackageAdapter.tracker

    def __init__(self, live: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._script_live = self._run = live
        self._image_file_names = ImageFileNames()

    @property
    def identity(self) -> dict[str, Any] | None:
        """Folder of the run's files, as {"dir": path}; None if there is no `dvclive.Live` object yet."""
        return None if self._run is None else {"dir": str(Path(self._run.dir).absolute())}

    def begin(self, run: TrackedRun) -> None:
        """Open the folder, or continue in the folder that `run.identity` names.

        Do nothing if the script has passed its own `live` object.
        """
        if self._script_live is not None:
            return
        defaults = {} if run.folder is None else {"dir": str(run.folder / "dvclive")}
        identity = {} if run.identity is None else {"dir": run.identity.get("dir"), "resume": True}
        self._run = self._package.Live(**defaults | identity | self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters.

        Values that are None are left out, because DVCLive cannot store them.
        """
        self._run.log_params(_drop_none(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics. Strings go to the summary, the only place for text in DVCLive.

        Args:
            values: Values by name, not nested.
            step: Number of optimizer updates, or the step that the script passed. Default: None, for DVCLive's own
                counter of steps.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        if step is not None:
            self._run.step = step
        super().log(values, step, **kwargs)
        self._run.next_step()

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self._run.summary[name] = value
        else:
            self._run.log_metric(name, value, **kwargs)

    def _log_image(self, name: str, suffix: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        """Write an image to `plots/images`, with the step in the file name."""
        self._run.log_image(self._image_file_names.choose(name, suffix, step), drop_gray_axis(image), **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file or a folder, which DVC tracks. Without a DVC repository it is not tracked, and DVCLive warns.

        Args:
            path: Path of the file or folder.
            name: Unused.
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        self._run.log_artifact(str(path), **kwargs)


class TrackioAdapter(RowAdapter):
    """Tracker for Trackio.

    Its database is in the folder that the environment variable TRACKIO_DIR names, or in Trackio's default folder.

    Args:
        kwargs: Arguments for `trackio.init`. Default of `project`: the run's name. Default of `name` after a restart:
            the name of the run that continues.
    """

    name = "trackio"
    identity_names = ("name", "name")

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies.

        The dashboard is not embedded in notebooks. Trackio prints a link to it instead.
        """
        self._run = self._package.init(**self._choose_arguments(run, embed=False))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as the run's config. Trackio sends it with the first values."""
        # Trackio reserves names that start with `_`.
        self._run.config.update({name.lstrip("_"): json.loads(json.dumps(value)) for name, value in values.items()})

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log the images of one step in one call. If a name has several images, they are numbered.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to Trackio.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        images = {
            name + suffix: self._package.Image(convert_to_color(image)) for name, suffix, image in number_images(values)
        }
        self._log_row(images, step, **kwargs)


def _replace_forbidden(name: str) -> str:
    """Return the name, with "_" in place of each character that MLflow rejects."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings without the values that are None."""
    return {
        name: _drop_none(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }
