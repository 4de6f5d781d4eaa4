"""ClearML: a task of the project; offline if ClearML is not configured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway import env
from headway.log import get_logger
from headway.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, pictures

log = get_logger(__name__)


class ClearMLTracker(Tracker):
    """Logs to ClearML; a task that the script started itself is used as is and left open.

    Args:
        kwargs: for `clearml.Task.init`; `project_name` and `task_name` are what CLEARML_PROJECT and CLEARML_TASK say, or the
            project's name, and after a restart `continue_last_task` is the known one's id, where they are not given.
    """

    name = "clearml"

    def __init__(self, **kwargs: Any) -> None:
        self._clearml: Any = require("clearml", "log_with='clearml' needs", "clearml")
        self._kwargs = kwargs
        self._task: Any = None
        self._is_own = True

    @property
    def tracker(self) -> Any:
        """The `clearml.Task`."""
        return self._task

    @property
    def task(self) -> Any:
        """The same, under the name that scripts use."""
        return self._task

    @property
    def identity(self) -> dict[str, Any] | None:
        """The task's id, if a server knows it: a task that was written offline cannot be continued."""
        is_known = self._task is not None and self._is_own and not self._task.is_offline()
        return {"id": self._task.id} if is_known else None

    def begin(self, run: TrackedRun) -> None:
        """Begin a task, or continue the known one."""
        task = self._clearml.Task
        current = task.current_task()
        self._is_own = current is None
        if current is not None:
            self._task = current
            return
        chosen: dict[str, Any] = {
            "project_name": env.get("CLEARML_PROJECT") or run.project,
            "task_name": env.get("CLEARML_TASK") or run.project,
        }
        if run.identity is not None:
            chosen |= {"continue_last_task": run.identity.get("id")}
        chosen |= self._kwargs
        missing = require("clearml.backend_api.session.defs", "log_with='clearml' needs", "clearml").MissingConfigError
        try:
            self._task = task.init(**chosen)
        except missing:
            log.info(
                "clearml is not configured here, so the task is written offline; upload it with Task.import_offline_session"
            )
            task.set_offline(True)
            self._task = task.init(**chosen)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as a configuration object."""
        self._task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars ("eval_loss" and "eval/loss" as the series "eval" of the chart "loss"), text as log lines."""
        logger = self._task.get_logger()
        for name, value in values.items():
            if isinstance(value, str):
                logger.report_text(f"{name}: {value}")
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = title_and_series(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Images as debug samples."""
        logger = self._task.get_logger()
        for name, images in values.items():
            title, series = title_and_series(name)
            for index, image in enumerate(several := pictures(images, name)):
                part = series if len(several) == 1 else f"{series}/{index}"
                shown = image.squeeze(2) if image.shape[2] == 1 else image
                logger.report_image(title=title, series=part, iteration=step, image=shown, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact."""
        self._task.upload_artifact(name, str(path), **kwargs)

    def flush(self) -> None:
        """Write queued values."""
        self._task.flush(wait_for_uploads=False)

    def finish(self) -> None:
        """Close the task, if the tracker created it."""
        if self._is_own:
            self._task.close()


def title_and_series(name: str) -> tuple[str, str]:
    """The chart and its series: "loss", "eval" for "eval_loss" or "eval/loss"; "train" for names without such a prefix."""
    for series in ("eval", "test", "train"):
        if name.startswith((f"{series}_", f"{series}/")):
            return name[len(series) + 1 :], series
    return name, "train"
