"""Trackers of packages that give one object for each run."""

from typing import Any, ClassVar

from headway.optional import require
from headway.tracking.base import Tracker


class HeldRun(Tracker):
    """Holds the object that a package gave for the run; `begin` of a subclass sets `_run`.

    Args:
        kwargs: for the package's own function that begins a run.
    """

    package: ClassVar[str]
    """What is imported."""
    installed_by: ClassVar[str] = ""
    """What to install where it is missing; empty: the package."""
    known_by: ClassVar[tuple[str, str]]
    """What finds the run again after a restart: its keyword, and the attribute of the run that has it."""

    def __init__(self, **kwargs: Any) -> None:
        wanted = self.installed_by or self.package
        self._package: Any = require(self.package, f"log_with={self.name!r} needs", wanted)
        self._kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The object that the package gave."""
        return self._run

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the package finds the run again by."""
        keyword, attribute = self.known_by
        return None if self._run is None else {keyword: getattr(self._run, attribute)}
