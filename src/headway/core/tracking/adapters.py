"""Base classes of the built-in trackers, which forward a run's values to another package."""

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from headway.common.optional import require
from headway.core.tracking.base import TrackedRun, Tracker
from headway.core.tracking.pictures import Picture, convert_images, drop_gray_axis, number_images


class PackageAdapter(Tracker):
    """Base class for trackers that wrap the run object of another package, such as MLflow's.

    A subclass's `begin` sets `_run`.

    Args:
        kwargs: Arguments for the package's function that starts a run. They override the arguments that Headway
            chooses.

    Raises:
        OptionalDependencyMissing: If the package is not installed.
    """

    requirement: ClassVar[str] = ""
    """Argument for `pip install` if the package is missing, such as "headway[trackers]".

    If empty, the tracker's name is used.
    """
    identity_names: ClassVar[tuple[str, str] | None] = None
    """Pair of names that are needed to continue a run after a restart; None if the tracker cannot continue runs.

    The first is a keyword of the package's function that starts a run. The second is the attribute of the run object
    that holds the value for this keyword.
    """
    takes = "numbers"
    end_method: ClassVar[str] = "finish"
    """Name of the run object's method that ends the run."""

    def __init__(self, **kwargs: Any) -> None:
        self._package: Any = require(self.name, f"log_with={self.name!r} needs", self.requirement or self.name)
        self._kwargs = kwargs
        self._run: Any = None  # run object of the package; None before `begin`
        self._is_own = True  # whether this tracker, not the script, started the package's run

    @property
    def tracker(self) -> Any:
        """Run object of the package; None before `begin`."""
        return self._run

    @property
    def identity(self) -> dict[str, Any] | None:
        """Keyword argument, as a dict, with which the package continues this run after a restart.

        None if the tracker cannot continue runs, or before `begin`.
        """
        if self.identity_names is None or self._run is None:
            return None
        keyword, attribute = self.identity_names
        return {keyword: attrgetter(attribute)(self._run)}

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each value separately: numbers as metrics, and strings in a form that depends on the package.

        Args:
            values: Values by name, not nested.
            step: Number of optimizer updates, or the step that the script passed to `accelerator.log`. Default: None,
                which leaves the step to the package.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        for name, value in values.items():
            self._log_value(name, value, step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log each image separately. If a name has several images, they are numbered.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to the package.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        for name, suffix, image in number_images(values):
            self._log_image(name, suffix, image, step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        """Log one number or string. Subclasses must define this method, or override `log`.

        Args:
            name: Name of the value.
            value: Number or string.
            step: Step of the run. None: the package chooses it.
            **kwargs: Passed to the package's method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define _log_value(name, value, step), or override log")

    def _log_image(self, name: str, suffix: str, image: Picture, step: int | None, **kwargs: Any) -> None:
        """Log one image. Subclasses must define this method, or override `log_images`.

        Args:
            name: Name under which the script logs the image.
            suffix: Text that distinguishes several images of one name, such as "/0". "" for a single image.
            image: Array of shape [H, W, C] and dtype uint8.
            step: Step of the run. None: the package chooses it.
            **kwargs: Passed to the package's method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define _log_image(...), or override log_images")

    def finish(self) -> None:
        """End the run with the package's own method, which may wait for uploads.

        A run that the script started itself, as is possible with MLflow and ClearML, is not ended.
        """
        if self._is_own:
            getattr(self._run, self.end_method)()


class RowAdapter(PackageAdapter):
    """Base class for trackers whose package logs all values of a step in one call, as W&B does."""

    identity_names: ClassVar[tuple[str, str]] = ("id", "id")
    takes = "objects"

    run = PackageAdapter.tracker
    """Run object of the package. Scripts access it as `tracker.run`."""

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or continue the one that `run.identity` identifies."""
        self._run = self._package.init(**self._choose_arguments(run))

    def _choose_arguments(self, run: TrackedRun, **defaults: Any) -> dict[str, Any]:
        """Return the arguments for the package's `init`. The user's arguments override the others.

        Args:
            run: Name, folder and identity of the run.
            defaults: Arguments that a subclass chooses in addition to the project's name and the run's identity.
        """
        keyword, _ = self.identity_names
        identity = {} if run.identity is None else {keyword: run.identity.get(keyword), "resume": "allow"}
        return {"project": run.project.replace("/", "-")} | defaults | identity | self._kwargs

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as the run's config."""
        self._run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step in one call.

        Args:
            values: Values by name, not nested.
            step: Number of optimizer updates, or the step that the script passed to `accelerator.log`. Default: None,
                which leaves the step to the package.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        self._log_row(dict(values), step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Picture]], step: int | None = None, **kwargs: Any) -> None:
        """Log the images of one step in one call.

        Args:
            values: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Number of optimizer updates, or the step that the script passed. Default: None, which leaves the step
                to the package.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        row = {
            name: [self._package.Image(drop_gray_axis(picture)) for picture in convert_images(images, name)]
            for name, images in values.items()
        }
        self._log_row(row, step, **kwargs)

    def log_artifact(self, path: Path, name: str, step: int | None = None, **kwargs: Any) -> None:
        """Log a file or a folder as an artifact. Its type is "file" unless `kwargs` contains another `type`.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact. Characters that packages reject become "_".
            step: Unused.
            kwargs: Keyword arguments from the entry of this tracker in `log_kwargs`.
        """
        self._run.log_artifact(str(path), **{"name": re.sub(r"[^\w\-.]", "_", name), "type": "file"} | kwargs)

    def _log_row(self, row: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Log the values of one step with the package's `log` method."""
        self._run.log(row, **{"step": step} | kwargs)
