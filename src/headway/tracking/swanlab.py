"""SwanLab: a run of the project; offline if nobody is logged in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway import env
from headway.log import get_logger
from headway.tracking.base import TrackedRun
from headway.tracking.held import HeldRun
from headway.tracking.pictures import Picture, pictures

log = get_logger(__name__)


class SwanLabTracker(HeldRun):
    """Logs to SwanLab.

    Args:
        kwargs: for `swanlab.init`; `project`, `log_dir` and, after a restart, `id` are the run's where they are not given.
    """

    name = "swanlab"
    package = "swanlab"
    known_by = ("id", "id")

    @property
    def run(self) -> Any:
        """The tracker's object, under the name that scripts use."""
        return self._run

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        chosen: dict[str, Any] = {"project": run.project.replace("/", "-")}
        if run.folder is not None and "logdir" not in self._kwargs:
            chosen["log_dir"] = str(run.folder / "swanlab")
        if run.identity is not None:
            chosen |= {"id": run.identity.get("id"), "resume": "allow"}
        if "mode" not in self._kwargs and env.get("SWANLAB_MODE") is None and not self._is_logged_in():
            log.info("swanlab: nobody is logged in, so the run is written offline; upload it with `swanlab sync`")
            chosen["mode"] = "offline"
        self._run = self._package.init(**chosen | self._kwargs)

    def _is_logged_in(self) -> bool:
        # In the environment, or in a file of this folder or the user's.
        return bool(env.get("SWANLAB_API_KEY") or self._package.Settings().api_key)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config."""
        self._run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row of values."""
        row = {name: self._package.Text(value) if isinstance(value, str) else value for name, value in values.items()}
        self._run.log(row, **{"step": step} | kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images."""
        row = {
            name: [
                self._package.Image(image.squeeze(2) if image.shape[2] == 1 else image)
                for image in pictures(images, name)
            ]
            for name, images in values.items()
        }
        self._run.log(row, **{"step": step} | kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file, or the files of a folder, copied into the run."""
        pattern = f"{path}/**" if path.is_dir() else str(path)
        self._run.save(pattern, **{"base_path": str(path.parent)} | kwargs)

    def finish(self) -> None:
        """End the run and wait for uploads."""
        self._run.finish()
