"""Selection of trackers for `log_with=`, by name, by entry point, or as objects."""

from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headway.common import env
from headway.common.optional import is_available
from headway.core.tracking.base import Tracker, TrackerMaker
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger

log = get_logger(__name__)
GROUP = "headway.trackers"
"""Entry point group with which other packages provide trackers.

The entry point's name is the tracker's name. It must refer to a `Tracker` class, whose arguments are the tracker's
entry in `init_kwargs`.
"""
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
    "opentelemetry": "services.OpenTelemetryAdapter",
}
_MODULES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
"""Name of the module that a tracker needs, by the tracker's name, if the two names differ."""
Choice = Tracker | TrackerMaker
"""Tracker instance that the user created, or a factory that creates a tracker when a run starts."""


def select_trackers(log_with: object, *, has_folder: bool, is_main: bool = True) -> list[Choice]:
    """Return the trackers that `log_with` selects. If two have the same name, the later one replaces the earlier one.

    Args:
        log_with: Name, `Tracker`, `TrackerMaker`, list of these, or None. "all" selects all installed trackers. None
            and "jsonl", the name of the run log, select no tracker.
        has_folder: Whether there is a logging folder for files.
        is_main: Whether this is rank 0. Other ranks do not need the trackers' packages. Default: True.

    Raises:
        ConfigError: If a name or type is unknown, a tracker has no name, or a tracker needs a folder and there is none.
        OptionalDependencyMissing: On rank 0, if the package of a tracker that was selected by name is not installed.
    """
    chosen: dict[str, Choice] = {}
    for each in log_with if isinstance(log_with, list | tuple | set) else [_ALWAYS if log_with is None else log_with]:
        choices: list[Any] = []
        if isinstance(each, Tracker | TrackerMaker):
            choices = [each]
        elif (asked := _read_name(each)) == "all":
            choices = [maker for maker in _find_installed(has_folder, is_main) if maker.name not in chosen]
        elif asked != _ALWAYS:
            choices = [_make_by_name(asked, is_main)]
        for choice in choices:
            name = getattr(choice, "name", None)
            if not isinstance(name, str):
                raise ConfigError(f"the tracker {type(choice).__name__} needs a `name`: a text to find it by")
            if choice.requires_logging_directory and not has_folder:
                raise ConfigError(
                    f"log_with={name!r} writes files and needs a directory: pass project_dir= to the Accelerator, or "
                    "project_config=ProjectConfiguration(logging_dir=...)"
                )
            chosen[name] = choice
    return list(chosen.values())


def _read_name(each: object) -> str:
    name = each.value if isinstance(each, Enum) else each
    if not isinstance(name, str):
        raise ConfigError(
            f"log_with={each!r} is not a tracker; give a name ({', '.join(_list_names())}), 'all', a "
            "headway.Tracker, or a list of these"
        )
    known = {each.lower(): each for each in _list_names()}  # the name of an entry point can have capital letters
    return known.get(name.lower(), name.lower())


def _list_names() -> list[str]:
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=GROUP))})


def _make_by_name(name: str, is_main: bool) -> TrackerMaker:
    if name not in _list_names():
        near = get_close_matches(name, _list_names(), 1)
        raise ConfigError(
            f"log_with={name!r}: no such tracker{f' (did you mean {near[0]!r}?)' if near else ''}; allowed: "
            f"{', '.join(_list_names())}, 'all', or an instance of headway.Tracker"
        )
    maker = _load_maker(name)
    if is_main and name in _BUILT_IN and not is_available(_MODULES.get(name, name)):
        extra = getattr(maker.make, "requirement", "")
        line = f"'{extra}'" if extra else name
        raise OptionalDependencyMissing(f"log_with={name!r} needs {name}, which is not installed: pip install {line}")
    return maker


def _load_maker(name: str) -> TrackerMaker:
    plugged = [each for each in entry_points(group=GROUP) if each.name == name]
    if plugged:
        kind = plugged[0].load()
    else:
        module, _, attribute = _BUILT_IN[name].partition(".")
        kind = getattr(import_module(f"headway.core.tracking.{module}"), attribute)
    return TrackerMaker(name, kind, getattr(kind, "requires_logging_directory", False))


def _find_installed(has_folder: bool, is_main: bool) -> list[TrackerMaker]:
    # Other packages install OpenTelemetry too, and without an endpoint no collector is listening.
    out = set() if env.get("OTEL_EXPORTER_OTLP_ENDPOINT") else {"opentelemetry"}
    fitting = [name for name in _list_names() if name not in _BUILT_IN or is_available(_MODULES.get(name, name))]
    found = [_load_maker(name) for name in fitting if name not in out]
    if not found and is_main:
        log.warning("log_with='all' found no tracker installed: pip install 'headway[trackers]'")
    for maker in found:
        if maker.requires_logging_directory and not has_folder:
            log.info("log_with='all' leaves %s out: it needs a logging_dir", maker.name)
    return [maker for maker in found if has_folder or not maker.requires_logging_directory]
