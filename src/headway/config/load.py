"""Layers of settings, each value with its origin: code > command line > HEADWAY_* > file > what was detected.

The launcher side resolves the layers and packs what workers need into one JSON payload; the worker side reads it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway.common import env
from headway.common.untrusted import parse_json
from headway.config.launch import EARLIER_NAMES, SETTINGS, LaunchConfig, Unset
from headway.config.launch import UNSET as UNSET
from headway.config.values import did_you_mean, from_file, from_text
from headway.errors import ConfigError

COMMAND_LINE = "command line"
VERSION = 1

# Variables of Headway that are not settings of a launch.
_OTHER_VARIABLES = tuple(
    """
    HEADWAY_RUN HEADWAY_HOME HEADWAY_DEVICE HEADWAY_LOG_LEVEL HEADWAY_CONFIG_FILE HEADWAY_CONTROL HEADWAY_MEMORY HEADWAY_PULSE
    HEADWAY_SECRET
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Value:
    """A decided value and where the decision was made, such as "environment: HEADWAY_NUM_PROCESSES"."""

    value: Any
    origin: str


Layer = Mapping[str, Value]


@dataclass(frozen=True)
class Resolved:
    """A whole configuration.

    Attributes:
        config: the settings; what nobody decided is UNSET.
        origins: for each decided setting, where.
        force: may the command line overrule the code?
    """

    config: LaunchConfig
    origins: Mapping[str, str]
    force: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """The setting `name`, or `default` where nobody decided it."""
        value = getattr(self.config, name)
        return default if isinstance(value, Unset) else value

    def origin(self, name: str) -> str:
        """Where the setting was decided; "default" where nobody did."""
        return self.origins.get(name, "default")


def resolve(layers: Sequence[Layer], *, force: bool = False) -> Resolved:
    """Put layers of settings together.

    Args:
        layers: the strongest first; a layer holds what it decides and nothing else.
        force: kept in the result, for the workers.

    Raises:
        ConfigError: a layer holds a setting that does not exist.
    """
    chosen: dict[str, Value] = {}
    for layer in layers:
        for name, value in layer.items():
            if name not in SETTINGS:
                raise ConfigError(f"{name} ({value.origin}) is not a setting{did_you_mean(name, list(SETTINGS))}")
            chosen.setdefault(name, value)
    config = LaunchConfig(**{name: entry.value for name, entry in chosen.items()})
    return Resolved(config, {name: entry.origin for name, entry in chosen.items()}, force)


def environment_layer(environment: Mapping[str, str]) -> dict[str, Value]:
    """What HEADWAY_* variables decide.

    Raises:
        ConfigError: a value cannot be read, or a variable looks like a misspelt setting.
    """
    variables = {setting.variable: setting for setting in SETTINGS.values() if setting.is_for_files}
    known = variables | {env.PREFIX + earlier.upper(): SETTINGS[name] for earlier, name in EARLIER_NAMES.items()}
    found = {}
    for variable in sorted(environment):  # a setting's earlier name comes before its present one, which wins
        if not variable.startswith(env.PREFIX) or variable in _OTHER_VARIABLES:
            continue
        origin = f"environment: {variable}"
        if variable in known:
            setting = known[variable]
            if environment[variable].strip():
                found[setting.name] = Value(from_text(setting, environment[variable], origin), origin)
            continue
        hint = did_you_mean(variable.removeprefix(env.PREFIX), [setting.name for setting in variables.values()])
        if hint:
            close = hint.removeprefix("; did you mean ").removesuffix("?")
            raise ConfigError(
                f"the environment variable {variable} is not a setting; did you mean {SETTINGS[close].variable}? Rename it"
            )
    return found


def payload(
    resolved: Resolved,
    num_processes: int,
    min_processes: int | None = None,
    device: str | None = None,
    ranks_per_machine: int | None = None,
) -> str:
    """The JSON text that carries a run's settings to its workers.

    Args:
        num_processes: over all machines.
        min_processes: with how many the run goes on where machines are lost; None: with all.
        device: torch's type of the devices that this machine's workers were counted by; None: they were not counted.
        ranks_per_machine: for layouts that follow the machines; None: one machine.
    """
    settings = {
        name: {"value": resolved.get(name), "origin": resolved.origin(name)}
        for name, setting in SETTINGS.items()
        if setting.is_for_workers and resolved.config.is_set(name)
    }
    content = {"version": VERSION, "settings": settings, "num_processes": num_processes, "force": resolved.force}
    if min_processes not in (None, num_processes):
        content["min_processes"] = min_processes
    if device is not None:
        content["device"] = device
    if ranks_per_machine not in (None, num_processes):
        content["ranks_per_machine"] = ranks_per_machine
    return json.dumps(content, separators=(",", ":"))


def _read_payload() -> dict[str, Any] | None:
    text = env.get(env.PAYLOAD)
    if not text:
        return None
    content: dict[str, Any] | None = None
    with suppress(ValueError):
        content = parse_json(text)
    if not _is_payload(content):
        raise ConfigError(
            f"the environment variable {env.PAYLOAD} holds no payload of this version of Headway: {text[:80]!r}. "
            "Only the launcher sets it: unset it, or start the script with `headway launch` of this installation"
        )
    return content


def _is_payload(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("version") != VERSION or type(content.get("force")) is not bool:
        return False
    numbers = [content.get("num_processes"), content.get("min_processes", 1), content.get("ranks_per_machine", 1)]
    settings = content.get("settings")
    return (
        all(type(number) is int and number > 0 for number in numbers)
        and isinstance(content.get("device", ""), str)
        and isinstance(settings, dict)
        and all(isinstance(each, dict) and isinstance(each.get("origin"), str) for each in settings.values())
        and all("value" in each for each in settings.values())
    )


def asked_num_processes() -> range | None:
    """How many processes there may be, as `headway launch` was asked; None without the launcher.

    Raises:
        ConfigError: the payload cannot be read.
    """
    content = _read_payload()
    if content is None:
        return None
    most = content["num_processes"]
    return range(content.get("min_processes", most), most + 1)


def promised_device() -> str | None:
    """The type of device that the launcher found for this process, "cpu" where it found no other; None: nobody counted."""
    found = (_read_payload() or {}).get("device")
    return None if found is None else str(found)


def ranks_per_machine() -> int | None:
    """How many processes the launcher has started on each of several machines; None on one, and without the launcher."""
    found = (_read_payload() or {}).get("ranks_per_machine")
    return None if found is None else int(found)


def run_setting(
    name: str,
    code_value: Any,
    default: Any,
    *,
    code_origin: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> tuple[Any, str]:
    """Decide one setting of a run, on the worker's side.

    Args:
        name: the setting, such as "mixed_precision".
        code_value: what the script says; UNSET or None where it says nothing.
        default: the value where nobody decides.
        code_origin: how an error calls the script's line: "Accelerator(mixed_precision='fp16') at train.py:12".
        parse: reads the text of HEADWAY_<NAME> for a setting that the launcher does not know.

    Returns:
        The value and its origin.

    Raises:
        ConfigError: the script and the command line say different things and `--force` was not given, or the
            variable's text cannot be read.
    """
    is_said = not (isinstance(code_value, Unset) or code_value is None)
    content = _read_payload()
    launched = None if content is None else content["settings"].get(name)
    origin = code_origin or f"{name}={code_value!r} in the code"
    if launched is not None:
        told = Value(from_file(SETTINGS[name], launched["value"], launched["origin"]), launched["origin"])
        if not is_said:
            return told.value, told.origin
        if told.origin.startswith(COMMAND_LINE) and told.value != code_value:
            assert content is not None
            if content["force"]:
                return told.value, told.origin
            raise ConfigError(_conflict(name, told, origin))
    if is_said:
        return code_value, f"code: {origin}"
    if content is None:
        return _from_environment(name, default, parse)
    return default, "default"


def _conflict(name: str, told: Value, origin: str) -> str:
    flag = f"--{name}" if told.value is True else f"--{name} {told.value}"
    return (
        f"{origin} against {flag} on the command line: take one of them out, "
        "or add --force to `headway launch` to let the command line win"
    )


def _from_environment(name: str, default: Any, parse: Callable[[str], Any] | None) -> tuple[Any, str]:
    names = [name, *(earlier for earlier, now in EARLIER_NAMES.items() if now == name)]
    variables = [env.PREFIX + each.upper() for each in names]
    variable = next((each for each in variables if (env.get(each) or "").strip()), None)
    if variable is None:
        return default, "default"
    text = str(env.get(variable))
    origin = f"environment: {variable}"
    if name in SETTINGS:
        return from_text(SETTINGS[name], text, origin), origin
    if parse is None:
        return text, origin
    try:
        return parse(text), origin
    except ValueError:
        message = f"the environment variable {variable}={text!r} cannot be read as {name}; correct or unset it"
        raise ConfigError(message) from None
