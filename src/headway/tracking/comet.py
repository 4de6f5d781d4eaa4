"""Comet: an experiment of the project; offline if there is no API key."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway import env
from headway.log import get_logger
from headway.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, file_name, pictures, write_png

log = get_logger(__name__)


class CometTracker(Tracker):
    """Logs to Comet.

    Args:
        kwargs: for `comet_ml.start`: workspace, online, experiment_config, ...; `project_name` and, after a restart,
            `experiment_key` are the run's where they are not given.
    """

    name = "comet_ml"

    def __init__(self, **kwargs: Any) -> None:
        self._comet: Any = require("comet_ml", "log_with='comet_ml' needs", "comet_ml")
        self._kwargs = kwargs
        self._experiment: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment that `comet_ml.start` returned."""
        return self._experiment

    @property
    def writer(self) -> Any:
        """The same, under the name that scripts use."""
        return self._experiment

    @property
    def identity(self) -> dict[str, Any] | None:
        """The experiment's key."""
        return None if self._experiment is None else {"experiment_key": self._experiment.get_key()}

    def begin(self, run: TrackedRun) -> None:
        """Start an experiment, or continue the known one."""
        chosen: dict[str, Any] = {"project_name": run.project}
        if run.identity is not None:
            chosen |= {"experiment_key": run.identity.get("experiment_key"), "mode": "get_or_create"}
        if "online" not in self._kwargs and self._kwargs.get("api_key") is None and not self._has_key():
            log.info(
                "comet_ml: there is no API key, so the experiment is written offline; upload it with `comet upload`"
            )
            chosen["online"] = False
            if run.folder is not None and "experiment_config" not in self._kwargs:
                chosen["experiment_config"] = self._comet.ExperimentConfig(offline_directory=str(run.folder))
        self._experiment = self._comet.start(**chosen | self._kwargs)

    def _has_key(self) -> bool:
        # What COMET_API_KEY or a file of Comet's says.
        return bool(env.get("COMET_API_KEY") or self._comet.get_config("comet.api_key"))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters."""
        self._experiment.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, text as "others"."""
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if numbers:
            self._experiment.log_metrics(numbers, **{"step": step} | kwargs)
        for name, value in values.items():
            if isinstance(value, str):
                self._experiment.log_other(name, value)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Images under their names."""
        with tempfile.TemporaryDirectory() as folder:
            for name, images in values.items():
                several = pictures(images, name)
                for index, image in enumerate(several):
                    path = Path(folder) / file_name(name, step, index, several)
                    write_png(path, image)
                    shown = name if len(several) == 1 else f"{name}/{index}"
                    self._experiment.log_image(str(path), **{"name": shown, "step": step, "copy_to_tmp": True} | kwargs)
            self.flush()

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or the files of a folder, as assets."""
        if path.is_dir():
            self._experiment.log_asset_folder(str(path), **{"step": step, "log_file_name": True} | kwargs)
        else:
            self._experiment.log_asset(str(path), **{"file_name": name, "step": step} | kwargs)

    def flush(self) -> None:
        """Wait until queued values are being sent."""
        self._experiment.flush()

    def finish(self) -> None:
        """End the experiment and wait for uploads."""
        self._experiment.end()
