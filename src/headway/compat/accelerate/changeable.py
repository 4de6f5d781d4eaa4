"""Accelerate's settings as scripts use them: Headway's, but fields can be changed until an Accelerator is created."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from headway.config import engines, run


class KwargsHandler:
    """The base of settings for `kwargs_handlers`: dataclasses whose fields have defaults."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = type(self)()
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]  # with a dataclass
        return {name: value for name, value in pairs if value != getattr(default, name)}

    def as_headway(self) -> Any:
        """What Headway's Accelerator gets instead."""
        return self


class Changeable(KwargsHandler):
    """Mixed into a frozen dataclass: fields can be assigned; `fixed` checks them and gives the frozen one."""

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def as_headway(self) -> Any:
        """Headway's own settings with the same fields, checked as if they were new."""
        frozen: Any = next(base for base in type(self).__mro__ if "__dataclass_fields__" in vars(base))
        return frozen(**{field.name: getattr(self, field.name) for field in fields(frozen) if field.init})


class AutocastKwargs(Changeable, engines.AutocastKwargs):
    """Options of torch.autocast."""


class DataLoaderConfiguration(Changeable, run.DataLoaderConfiguration):
    """How prepared loaders split, pad and move batches."""


class DistributedDataParallelKwargs(Changeable, engines.DistributedDataParallelKwargs):
    """Options of torch's DistributedDataParallel."""


class GradScalerKwargs(Changeable, engines.GradScalerKwargs):
    """Options of torch's GradScaler."""


class GradientAccumulationPlugin(Changeable, run.GradientAccumulationPlugin):
    """How micro-batches form an update."""


class InitProcessGroupKwargs(Changeable, engines.InitProcessGroupKwargs):
    """Options of torch's init_process_group."""


class ProfileKwargs(Changeable, engines.ProfileKwargs):
    """Options of torch's profiler."""


class ProjectConfiguration(Changeable, run.ProjectConfiguration):
    """Where a run keeps its files."""

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, and `logging_dir` if it is not set."""
        self.__setattr__("project_dir", project_dir)
        if self.logging_dir is None:
            self.__setattr__("logging_dir", project_dir)


class _Live:
    """Mixed in before settings: an Accelerator's own, which takes each assignment up.

    Args:
        now: the settings in force.
        use: takes the changed ones.
    """

    def __init__(self, now: Any, use: Callable[[Any], None]) -> None:
        vars(self).update({field.name: getattr(now, field.name) for field in fields(now)})
        self._use = use

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "_use":
            self._use(fixed(self))


class LiveDataLoaderConfiguration(_Live, DataLoaderConfiguration):
    """How loaders that are prepared later split, pad and move batches."""


class LiveProjectConfiguration(_Live, ProjectConfiguration):
    """Where the run keeps its files."""


def fixed(settings: Any) -> Any:
    """What Headway's Accelerator accepts: changeable settings as Headway's own, anything else unchanged."""
    return settings.as_headway() if isinstance(settings, KwargsHandler) else settings
