"""What trackers of other packages have in common: the package's object for the run, and the loops over values and images."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headway.common.optional import require
from headway.tracking.base import TrackedRun, Tracker
from headway.tracking.pictures import Picture, numbered, pictures, without_axis


class PackageAdapter(Tracker):
    """Holds the object that a package gave for the run; a subclass's `begin` sets `_run`.

    Args:
        kwargs: for the package's own function that begins a run; they win over what Headway chooses.
    """

    installed_by: ClassVar[str] = ""
    """What to install where the package is missing; empty: the package."""
    known_by: ClassVar[tuple[str, str] | None] = None
    """What finds the run again after a restart: its keyword, and the attribute of the run that has it."""
    takes = "numbers"
    ended_by: ClassVar[str] = "finish"
    """The run's method that ends it."""

    def __init__(self, **kwargs: Any) -> None:
        self._package: Any = require(self.name, f"log_with={self.name!r} needs", self.installed_by or self.name)
        self._kwargs = kwargs
        self._run: Any = None
        self._is_own = True

    @property
    def tracker(self) -> Any:
        """The object that the package gave."""
        return self._run

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the package finds the run again by."""
        if self.known_by is None or self._run is None:
            return None
        keyword, attribute = self.known_by
        return {keyword: getattr(self._run, attribute)}

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Each value by itself, numbers as metrics and texts as the package has them."""
        for name, value in values.items():
            self._log_value(name, value, step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Each image by itself, numbered where one name has several."""
        for name, part, image in numbered(values):
            self._log_image(name, part, image, step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def _log_image(self, name: str, part: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """End the run, and wait for uploads; one that the script began itself is left open."""
        if self._is_own:
            getattr(self._run, self.ended_by)()


class RowAdapter(PackageAdapter):
    """For packages that take all values of a step in one call."""

    known_by: ClassVar[tuple[str, str]] = ("id", "id")
    takes = "objects"

    run = PackageAdapter.tracker
    """The name that scripts know."""

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the known one."""
        self._run = self._package.init(**self._choose_arguments(run))

    def _choose_arguments(self, run: TrackedRun, **chosen: Any) -> dict[str, Any]:
        """What `init` is given: the run's project, what a subclass has `chosen`, the known run; the user's win."""
        keyword, _ = self.known_by
        known = {} if run.identity is None else {keyword: run.identity.get(keyword), "resume": "allow"}
        return {"project": run.project.replace("/", "-")} | chosen | known | self._kwargs

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration as the run's config."""
        self._run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row of values."""
        self._log_row(dict(values), step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """One row of images."""
        shown = {name: [without_axis(each) for each in pictures(images, name)] for name, images in values.items()}
        self._log_row({name: list(map(self._package.Image, each)) for name, each in shown.items()}, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """A file or a folder as an artifact of type "file", or of `type=`."""
        self._run.log_artifact(str(path), **{"name": re.sub(r"[^\w\-.]", "_", name), "type": "file"} | kwargs)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self._run.log(row, **{"step": step} | kwargs)
