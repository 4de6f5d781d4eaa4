"""From `log_with=` to trackers: the built-in ones, those of entry points, and the user's own."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger
from headway.optional import available
from headway.tracking.base import Tracker, TrackerMaker

log = get_logger(__name__)

GROUP = "headway.trackers"
"""The entry point group: a name, and a `Tracker` class that takes what `init_kwargs` gives."""

_ALWAYS = "jsonl"
_BUILT_IN = {
    "tensorboard": "local.TensorBoardAdapter",
    "wandb": "services.WandbAdapter",
    "mlflow": "local.MLflowAdapter",
    "comet_ml": "services.CometAdapter",
    "aim": "local.AimAdapter",
    "clearml": "services.ClearMLAdapter",
    "dvclive": "local.DVCLiveAdapter",
    "swanlab": "services.SwanLabAdapter",
    "trackio": "local.TrackioAdapter",
}

Choice = Tracker | tuple[str, Callable[..., Tracker]]
"""A user's own tracker, or the name and the class of one that is built when a run begins."""


def select_trackers(log_with: object, *, has_folder: bool, is_main: bool = True) -> list[Choice]:
    """The trackers that `log_with` asks for, each once.

    Args:
        log_with: a name, a `Tracker` or what makes one, a list of them, or None; "all": those that are installed.
        has_folder: is there a place for files?
        is_main: only rank 0 needs the packages.

    Raises:
        ConfigError: an unknown name, an object of another kind, or one that needs a folder where there is none.
        OptionalDependencyMissing: a package that was asked for by name is not installed.
    """
    chosen: dict[str, Choice] = {}
    for each in _as_list(log_with):
        if isinstance(each, Tracker):
            name = getattr(each, "name", None)
            if not isinstance(name, str):
                raise ConfigError(f"the tracker {type(each).__name__} needs a `name`: a text to find it by")
            if each.requires_logging_directory and not has_folder:
                raise _needs_folder(name)
            chosen[name] = each
        elif isinstance(each, TrackerMaker):
            if each.requires_logging_directory and not has_folder:
                raise _needs_folder(each.name)
            chosen[each.name] = each.name, each.make
        elif _text(each) == "all":
            for name, choice in _installed(has_folder, is_main):
                chosen.setdefault(name, choice)
        elif (name := _text(each)) != _ALWAYS:
            chosen[name] = name, _by_name(name, has_folder, is_main)
    return list(chosen.values())


def _as_list(log_with: object) -> Iterable[Any]:
    if log_with is None:
        return []
    return log_with if isinstance(log_with, list | tuple | set) else [log_with]


def _text(each: object) -> str:
    name = each.value if isinstance(each, Enum) else each
    if not isinstance(name, str):
        raise ConfigError(
            f"log_with={each!r} is not a tracker; give a name ({', '.join(_names())}), 'all', an instance of headway.Tracker, or "
            "a list of these"
        )
    return name.lower()


def _names() -> list[str]:
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=GROUP))})


def _by_name(name: str, has_folder: bool, is_main: bool) -> Callable[..., Tracker]:
    if name not in _names():
        near = get_close_matches(name, _names(), 1)
        raise ConfigError(
            f"log_with={name!r}: no such tracker{f' (did you mean {near[0]!r}?)' if near else ''}; allowed: "
            f"{', '.join(_names())}, 'all', or an instance of headway.Tracker"
        )
    kind = _load(name)
    if getattr(kind, "requires_logging_directory", False) and not has_folder:
        raise _needs_folder(name)
    if is_main and name in _BUILT_IN and not available(name):
        extra = getattr(kind, "installed_by", "")
        line = f"'{extra}'" if extra else name
        raise OptionalDependencyMissing(f"log_with={name!r} needs {name}, which is not installed: pip install {line}")
    return kind


def _load(name: str) -> Callable[..., Tracker]:
    for each in entry_points(group=GROUP):
        if each.name == name:
            found: Callable[..., Tracker] = each.load()
            return found
    module, _, kind = _BUILT_IN[name].partition(".")
    built_in: Callable[..., Tracker] = getattr(import_module(f"headway.tracking.{module}"), kind)
    return built_in


def _installed(has_folder: bool, is_main: bool) -> list[tuple[str, Choice]]:
    found: list[tuple[str, Choice]] = []
    for name in _names():
        if name in _BUILT_IN and not available(name):
            continue
        kind = _load(name)
        if getattr(kind, "requires_logging_directory", False) and not has_folder:
            log.info("log_with='all' leaves %s out: it needs a logging_dir", name)
            continue
        found.append((name, (name, kind)))
    if not found and is_main:
        log.warning("log_with='all' found no tracker installed: pip install 'headway[trackers]'")
    return found


def _needs_folder(name: str) -> ConfigError:
    return ConfigError(
        f"log_with={name!r} writes files and needs a place: pass project_dir= to the Accelerator, or "
        "project_config=ProjectConfiguration(logging_dir=...)"
    )
