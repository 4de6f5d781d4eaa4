"""Aim: a run in the repository in the logging folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headway.tracking.base import TrackedRun
from headway.tracking.held import HeldRun
from headway.tracking.pictures import Picture, pictures


class AimTracker(HeldRun):
    """Logs to Aim.

    Args:
        kwargs: for `aim.Run`; `repo` is the logging folder, which all its projects share, `experiment` the project's name, and
            after a restart `run_hash` the known run's, where they are not given.
    """

    name = "aim"
    package = "aim"
    known_by = ("run_hash", "hash")
    requires_logging_directory = True

    @property
    def writer(self) -> Any:
        """The tracker's object, under the name that scripts use."""
        return self._run

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        chosen: dict[str, Any] = {"experiment": run.project}
        if run.folder is not None:
            depth = len(PurePosixPath(run.project).parts)
            repo = run.folder.parents[depth - 1]
            repo.mkdir(parents=True, exist_ok=True)
            chosen["repo"] = str(repo)
        if run.identity is not None:
            chosen["run_hash"] = run.identity.get("run_hash")
        self._run = self._package.Run(**chosen | self._kwargs)
        self._run.name = run.project

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as `hparams`."""
        self._run["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, text as text."""
        for name, value in values.items():
            told = self._package.Text(value) if isinstance(value, str) else value
            self._run.track(told, **{"name": name, "step": step} | kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Images under their names."""
        for name, images in values.items():
            several = [
                self._package.Image(image.squeeze(2) if image.shape[2] == 1 else image)
                for image in pictures(images, name)
            ]
            told = several[0] if len(several) == 1 else several
            self._run.track(told, **{"name": name, "step": step} | kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder, copied into the repository unless the run stores artifacts elsewhere."""
        if self._run.artifacts_uri is None:
            self._run.set_artifacts_uri((Path(self._run.repo.path) / "artifacts").as_uri())
        if path.is_dir():
            self._run.log_artifacts(str(path), name, **kwargs)
        else:
            self._run.log_artifact(str(path), name, **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self._run.close()
