"""An Accelerator's own settings as scripts for Accelerate use them: it takes each assignment to a field up."""

from collections.abc import Callable
from typing import Any

from headway.config.run import DataLoaderConfiguration, ProjectConfiguration
from headway.config.values import KwargsHandler


class _TakenUp(KwargsHandler):
    """Mixed in before settings.

    Args:
        now: the settings in force.
        use: takes all fields after an assignment.
    """

    _use: Callable[[dict[str, Any]], None]

    def __init__(self, now: KwargsHandler, use: Callable[[dict[str, Any]], None]) -> None:
        vars(self).update(now.to_dict(), _use=use)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        self._use(self.to_dict())


class LiveDataLoaderConfiguration(_TakenUp, DataLoaderConfiguration):
    """How loaders that are prepared later split, pad and move batches."""


class LiveProjectConfiguration(_TakenUp, ProjectConfiguration):
    """Where the run keeps its files."""
