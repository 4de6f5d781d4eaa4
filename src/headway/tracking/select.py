"""From `log_with=` to trackers: the built-in ones, those of entry points, and the user's own."""

from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headway.common import env
from headway.common.optional import available
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.log import get_logger
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
    "opentelemetry": "services.OpenTelemetryAdapter",
}
_MODULES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
"""What is imported, where it is not the tracker's name."""

Choice = Tracker | TrackerMaker
"""A user's own tracker, or what builds one when a run begins."""


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
                    f"log_with={name!r} writes files and needs a place: pass project_dir= to the Accelerator, or "
                    "project_config=ProjectConfiguration(logging_dir=...)"
                )
            chosen[name] = choice
    return list(chosen.values())


def _read_name(each: object) -> str:
    name = each.value if isinstance(each, Enum) else each
    if not isinstance(name, str):
        raise ConfigError(
            f"log_with={each!r} is no tracker; give a name ({', '.join(_names())}), 'all', a headway.Tracker, or a list of these"
        )
    return name.lower()


def _names() -> list[str]:
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=GROUP))})


def _make_by_name(name: str, is_main: bool) -> TrackerMaker:
    if name not in _names():
        near = get_close_matches(name, _names(), 1)
        raise ConfigError(
            f"log_with={name!r}: no such tracker{f' (did you mean {near[0]!r}?)' if near else ''}; allowed: "
            f"{', '.join(_names())}, 'all', or an instance of headway.Tracker"
        )
    maker = _load_maker(name)
    if is_main and name in _BUILT_IN and not available(_MODULES.get(name, name)):
        extra = getattr(maker.make, "installed_by", "")
        line = f"'{extra}'" if extra else name
        raise OptionalDependencyMissing(f"log_with={name!r} needs {name}, which is not installed: pip install {line}")
    return maker


def _load_maker(name: str) -> TrackerMaker:
    plugged = [each for each in entry_points(group=GROUP) if each.name == name]
    if plugged:
        kind = plugged[0].load()
    else:
        module, _, attribute = _BUILT_IN[name].partition(".")
        kind = getattr(import_module(f"headway.tracking.{module}"), attribute)
    return TrackerMaker(name, kind, getattr(kind, "requires_logging_directory", False))


def _find_installed(has_folder: bool, is_main: bool) -> list[TrackerMaker]:
    # Other packages bring OpenTelemetry along, and nobody listens.
    out = set() if env.get("OTEL_EXPORTER_OTLP_ENDPOINT") else {"opentelemetry"}
    fitting = [name for name in _names() if name not in _BUILT_IN or available(_MODULES.get(name, name))]
    found = [_load_maker(name) for name in fitting if name not in out]
    if not found and is_main:
        log.warning("log_with='all' found no tracker installed: pip install 'headway[trackers]'")
    for maker in found:
        if maker.requires_logging_directory and not has_folder:
            log.info("log_with='all' leaves %s out: it needs a logging_dir", maker.name)
    return [maker for maker in found if has_folder or not maker.requires_logging_directory]
