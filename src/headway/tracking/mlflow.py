"""MLflow: a run of the experiment that is called as the project, on whatever store MLflow is set to."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, file_name, pictures, write_png
from headway.tracking.values import leaves

_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_MAX_PARAMS = 100
_MAX_TEXT = 500


class MLflowTracker(Tracker):
    """Logs to MLflow; the run is MLflow's active one, so that `mlflow.log_param` and the like go into it too.

    Args:
        tracking_uri: where; None: as MLflow is set (MLFLOW_TRACKING_URI, or a database in the working folder).
        experiment_name: None: the project's name.
        run_id: a run to go on with; None: the one that the run's log knows, or a new one.
        kwargs: for `mlflow.start_run`: run_name, tags, description, nested.
    """

    name = "mlflow"

    def __init__(
        self,
        tracking_uri: str | Path | None = None,
        experiment_name: str | None = None,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._mlflow: Any = require("mlflow", "log_with='mlflow' needs", "headway[trackers]")
        self._uri = tracking_uri
        self._experiment = experiment_name
        self._run_id = run_id
        self._kwargs = kwargs
        self._run: Any = None
        self._is_own = True

    @property
    def tracker(self) -> Any:
        """MLflow's run."""
        return self._run

    @property
    def active_run(self) -> Any:
        """The same, by the name that scripts know."""
        return self._run

    @property
    def identity(self) -> dict[str, Any] | None:
        """The run's id."""
        return None if self._run is None else {"run_id": self._run.info.run_id}

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with the known one; a run that the script has made active is used as it is."""
        if self._uri is not None:
            self._mlflow.set_tracking_uri(str(self._uri))
        active = self._mlflow.active_run()
        self._is_own = active is None or bool(self._kwargs.get("nested"))
        if not self._is_own:
            self._run = active
            return
        self._mlflow.set_experiment(self._experiment or run.project)
        run_id = self._run_id or (run.identity or {}).get("run_id")
        self._run = self._mlflow.start_run(run_id=run_id, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters; MLflow never changes one, so what differs after a restart becomes a tag."""
        before = self._mlflow.get_run(self._run.info.run_id).data.params
        texts = {_name(name): _text(value) for name, value in leaves(values).items()}
        new = [(name, text) for name, text in texts.items() if name not in before]
        for first in range(0, len(new), _MAX_PARAMS):
            self._mlflow.log_params(dict(new[first : first + _MAX_PARAMS]))
        changed = {f"{name} after restart": text for name, text in texts.items() if before.get(name, text) != text}
        if changed:
            self._mlflow.set_tags(changed)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, texts as tags."""
        numbers = {_name(name): float(value) for name, value in values.items() if not isinstance(value, str)}
        texts = {_name(name): value for name, value in values.items() if isinstance(value, str)}
        if numbers:
            self._mlflow.log_metrics(numbers, **{"step": step, "run_id": self._run.info.run_id} | kwargs)
        if texts:
            self._mlflow.set_tags(texts)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """PNG files under `images/`."""
        with tempfile.TemporaryDirectory() as folder:
            for name, images in values.items():
                several = pictures(images, name)
                for index, image in enumerate(several):
                    write_png(Path(folder) / file_name(name, step, index, several), image)
            self._mlflow.log_artifacts(folder, "images", run_id=self._run.info.run_id)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or a folder under its name."""
        if path.is_dir():
            self._mlflow.log_artifacts(str(path), name, run_id=self._run.info.run_id)
        else:
            self._mlflow.log_artifact(str(path), run_id=self._run.info.run_id, **kwargs)

    def finish(self) -> None:
        """End the run, unless it is the script's own."""
        if self._is_own:
            self._mlflow.end_run()


def _name(name: str) -> str:
    return _FORBIDDEN.sub("_", name)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))[:_MAX_TEXT]
