"""Selection of trackers for `log_with=`, by name, by entry point, or as objects."""

from collections.abc import Iterable, Mapping, Sequence
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
ENTRY_POINT_GROUP = "headway.trackers"
"""Entry point group with which other packages provide trackers.

The entry point's name is the tracker's name. It must refer to a `Tracker` class, whose arguments are the tracker's
entry in `init_kwargs`.
"""
_RUN_LOG = "jsonl"
"""Name of the run log, which is always written and therefore selects no tracker."""
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
"""Class of each built-in tracker, as "module.class", by the tracker's name. The module is imported on first use."""
_MODULE_NAMES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}
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
    if isinstance(log_with, list | tuple | set):
        entries = list(log_with)
    else:
        entries = [] if log_with is None else [log_with]
    for entry in entries:
        for choice in _select_entry(entry, chosen, has_folder, is_main):
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


def _select_entry(entry: object, chosen: Mapping[str, Choice], has_folder: bool, is_main: bool) -> list[Any]:
    """Return the trackers that one entry of `log_with` selects.

    Args:
        entry: Name, `Tracker` or `TrackerMaker`.
        chosen: Trackers that earlier entries selected, by name. "all" leaves them out.
        has_folder: Whether there is a logging folder. Without one, "all" leaves out trackers that write files.
        is_main: Whether this is rank 0. Other ranks do not need the trackers' packages.

    Raises:
        ConfigError: If a name or type is unknown.
        OptionalDependencyMissing: On rank 0, if the package of a tracker that is selected by name is not installed.
    """
    if isinstance(entry, Tracker | TrackerMaker):
        return [entry]
    name = _read_name(entry)
    if name == "all":
        return [maker for maker in _find_installed(has_folder, is_main) if maker.name not in chosen]
    return [] if name == _RUN_LOG else [_make_by_name(name, is_main)]


def _read_name(entry: object) -> str:
    """Return the name in an entry of `log_with`, in the spelling of the tracker.

    Raises:
        ConfigError: If the entry is not a name.
    """
    name = entry.value if isinstance(entry, Enum) else entry
    if not isinstance(name, str):
        raise ConfigError(
            f"log_with={entry!r} is not a tracker; give a name ({', '.join(_list_names())}), 'all', a "
            "headway.Tracker, or a list of these"
        )
    known = {each.lower(): each for each in _list_names()}  # the name of an entry point can have capital letters
    return known.get(name.lower(), name.lower())


def _list_names() -> list[str]:
    """Return the sorted names of all trackers: the built-in ones, and those that other packages provide."""
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=ENTRY_POINT_GROUP))})


def warn_of_unknown_names(argument: str, names: Iterable[Any], choices: Sequence[Choice]) -> None:
    """Warn once of names in `init_kwargs` or `log_kwargs` that no tracker has, so that their entries have no effect.

    Names of trackers that `log_with` does not select are no mistake: the script may select them in another run.

    Args:
        argument: "init_kwargs" or "log_kwargs".
        names: Keys of the argument.
        choices: Trackers that `log_with` selects.
    """
    selected = {choice.name for choice in choices}
    if selected.issuperset(names):
        return
    known = selected.union(_list_names())
    for name in names:
        if name not in known:
            near = get_close_matches(str(name), sorted(known), 1)
            log.warning_once(
                "%s has no effect for %r, which is not the name of a tracker%s; give a dict of keyword arguments for each tracker, "
                "such as %s={'wandb': {...}}",
                argument,
                name,
                f" (did you mean {near[0]!r}?)" if near else "",
                argument,
            )


def _make_by_name(name: str, is_main: bool) -> TrackerMaker:
    """Return the factory of the tracker with a name.

    Raises:
        ConfigError: If the name is unknown.
        OptionalDependencyMissing: On rank 0, if the tracker's package is not installed.
    """
    if name not in _list_names():
        near = get_close_matches(name, _list_names(), 1)
        raise ConfigError(
            f"log_with={name!r}: no such tracker{f' (did you mean {near[0]!r}?)' if near else ''}; allowed: "
            f"{', '.join(_list_names())}, 'all', or an instance of headway.Tracker"
        )
    maker = _load_maker(name)
    if is_main and name in _BUILT_IN and not is_available(_MODULE_NAMES.get(name, name)):
        requirement = getattr(maker.make, "requirement", "")
        argument = f"'{requirement}'" if requirement else name
        raise OptionalDependencyMissing(
            f"log_with={name!r} needs {name}, which is not installed: pip install {argument}"
        )
    return maker


def _load_maker(name: str) -> TrackerMaker:
    """Import a tracker's class, and return the object that creates the tracker. An entry point precedes a built-in tracker."""
    registered = [each for each in entry_points(group=ENTRY_POINT_GROUP) if each.name == name]
    if registered:
        tracker_class = registered[0].load()
    else:
        module, _, attribute = _BUILT_IN[name].partition(".")
        tracker_class = getattr(import_module(f"headway.core.tracking.{module}"), attribute)
    return TrackerMaker(name, tracker_class, getattr(tracker_class, "requires_logging_directory", False))


def _find_installed(has_folder: bool, is_main: bool) -> list[TrackerMaker]:
    """Return the factories of all trackers whose packages are installed, for `log_with="all"`.

    Args:
        has_folder: Whether there is a logging folder. Without one, trackers that write files are left out.
        is_main: Whether this is rank 0, which warns if no tracker is installed.
    """
    # Other packages install OpenTelemetry too, and without an endpoint no collector is listening.
    excluded = set() if env.get("OTEL_EXPORTER_OTLP_ENDPOINT") else {"opentelemetry"}
    installed = [name for name in _list_names() if name not in _BUILT_IN or is_available(_MODULE_NAMES.get(name, name))]
    makers = [_load_maker(name) for name in installed if name not in excluded]
    if not makers and is_main:
        log.warning("log_with='all' found no tracker installed: pip install 'headway[trackers]'")
    for maker in makers:
        if maker.requires_logging_directory and not has_folder:
            log.info("log_with='all' leaves %s out: it needs a logging_dir", maker.name)
    return [maker for maker in makers if has_folder or not maker.requires_logging_directory]
