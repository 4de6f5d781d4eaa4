"""Trackio: a run of the project in a local database."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.tracking.base import TrackedRun
from headway.tracking.held import HeldRun
from headway.tracking.pictures import Picture, pictures


class TrackioTracker(HeldRun):
    """Logs to Trackio, into the database of TRACKIO_DIR or Trackio's own default.

    Args:
        kwargs: for `trackio.init`; `project` is the run's, and after a restart `name` the known one's, where they are not given.
    """

    name = "trackio"
    package = "trackio"
    known_by = ("name", "name")

    @property
    def run(self) -> Any:
        """The tracker's object, under the name that scripts use."""
        return self._run

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one; its link is logged, and no page opens in a notebook."""
        chosen: dict[str, Any] = {"project": run.project.replace("/", "-"), "embed": False}
        if run.identity is not None:
            chosen |= {"name": run.identity.get("name"), "resume": "allow"}
        self._run = self._package.init(**chosen | self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config; it is sent with the first values."""
        # `_` at the beginning is Trackio's own.
        self._run.config.update({name.lstrip("_"): json.loads(json.dumps(value)) for name, value in values.items()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row of values."""
        self._run.log(dict(values), **{"step": step} | kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images, numbered if one name has several."""
        row: dict[str, Any] = {}
        for name, images in values.items():
            for index, image in enumerate(several := pictures(images, name)):
                shown = image.repeat(3, axis=2) if image.shape[2] == 1 else image
                row[name if len(several) == 1 else f"{name}/{index}"] = self._package.Image(shown)
        self._run.log(row, **{"step": step} | kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact of type "file", or of `type=`."""
        plain = re.sub(r"[^\w\-.]", "_", name)
        self._run.log_artifact(str(path), **{"name": plain, "type": "file"} | kwargs)

    def finish(self) -> None:
        """End the run; wait until it is written."""
        self._run.finish()
