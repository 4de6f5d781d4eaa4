"""DVCLive: a run's values as plain files, which DVC compares between commits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, file_name, pictures


class DVCLiveTracker(Tracker):
    """Logs to DVCLive.

    Args:
        live: a `dvclive.Live` of your own; None: one is made.
        kwargs: for `dvclive.Live`; `dir` is `dvclive` in the run's folder, and after a restart `resume` is True, where they are
            not given.
    """

    name = "dvclive"

    def __init__(self, live: Any = None, **kwargs: Any) -> None:
        self._dvclive: Any = require("dvclive", "log_with='dvclive' needs", "dvclive")
        self._given = live
        self._kwargs = kwargs
        self._live: Any = live

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self._live

    @property
    def live(self) -> Any:
        """The same, under the name that scripts use."""
        return self._live

    @property
    def identity(self) -> dict[str, Any] | None:
        """The folder of its files."""
        return None if self._live is None else {"dir": str(Path(self._live.dir).absolute())}

    def begin(self, run: TrackedRun) -> None:
        """Open the folder, or continue in the known one."""
        if self._given is not None:
            return
        chosen: dict[str, Any] = {}
        if run.folder is not None:
            chosen["dir"] = str(run.folder / "dvclive")
        if run.identity is not None:
            chosen |= {"dir": run.identity.get("dir"), "resume": True}
        self._live = self._dvclive.Live(**chosen | self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as parameters; DVCLive cannot store None."""
        self._live.log_params(_without_none(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; text goes to the summary, the only place DVCLive has for it."""
        if step is not None:
            self._live.step = step
        for name, value in values.items():
            if isinstance(value, str):
                self._live.summary[name] = value
            else:
                self._live.log_metric(name, value, **kwargs)
        self._live.next_step()

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Images in `plots/images`, each with its step in its name."""
        for name, images in values.items():
            for index, image in enumerate(several := pictures(images, name)):
                shown = image.squeeze(2) if image.shape[2] == 1 else image
                self._live.log_image(file_name(name, step, index, several), shown, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder, tracked by DVC; without a DVC repository it stays in place, and DVCLive warns."""
        self._live.log_artifact(str(path), **kwargs)

    def finish(self) -> None:
        """Write the last summary, and the experiment if there is a repository."""
        self._live.end()


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, Mapping) else value for name, value in kept.items()}
