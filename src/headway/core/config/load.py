"""Merge sources of settings (layers). Precedence: code > command line > HEADWAY_* > config file > detected.

Each value is recorded with its origin. The launcher merges the layers, and passes the settings that workers need as one
JSON payload. In a worker, `resolve_run_setting` reads this payload.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.common import env
from headway.common.untrusted import parse_json
from headway.core.config.launch import EARLIER_NAMES, FIXED_FOR_FUNCTIONS, SETTINGS, LaunchConfig, Unset
from headway.core.config.launch import UNSET as UNSET
from headway.core.config.values import check_file_value, find_similar_words, parse_text, suggest_word
from headway.errors import ConfigError

COMMAND_LINE = "command line"
"""Beginning of the origin of a setting from the command line."""
_PAYLOAD_VERSION = 1
"""Version of the payload that the launcher passes to its workers."""

_OTHER_VARIABLES = (
    "HEADWAY_RUN", "HEADWAY_HOME", "HEADWAY_DEVICE", "HEADWAY_LOG_LEVEL", "HEADWAY_CONFIG_FILE", "HEADWAY_CONTROL",
    "HEADWAY_MEMORY", "HEADWAY_PULSE", "HEADWAY_RESTART_REASON", "HEADWAY_SECRET",
)  # fmt: skip
"""Environment variables with the prefix HEADWAY_ that are not settings of a launch."""


class SettingValue(NamedTuple):
    """Value of a setting, with its origin.

    Attributes:
        value: Value of the setting.
        origin: Place where the value was set, such as "environment: HEADWAY_NUM_PROCESSES".
    """

    value: Any
    origin: str


Layer = Mapping[str, SettingValue]
"""Settings from one source, such as the command line, by name."""


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings of a launch, merged from all sources, each with its origin.

    Attributes:
        config: Merged settings. A setting without a value is UNSET.
        origins: Origin of each setting that is set.
        force: Whether the command line may overrule the code.
    """

    config: LaunchConfig
    origins: Mapping[str, str]
    force: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, or `default` if it is not set.

        Args:
            name: Name of the setting.
            default: Value to return if the setting is not set. Default: None.
        """
        value = getattr(self.config, name)
        return default if isinstance(value, Unset) else value

    def get_origin(self, name: str) -> str:
        """Return the origin of a setting, such as "environment: HEADWAY_NUM_PROCESSES".

        Return "default" if the setting is not set.

        Args:
            name: Name of the setting.
        """
        return self.origins.get(name, "default")


def merge_layers(layers: Sequence[Layer], *, force: bool = False) -> ResolvedSettings:
    """Merge layers of settings, and return the merged settings with the origin of each value.

    Args:
        layers: Layers in descending precedence. Each contains only the settings that it sets.
        force: Whether the command line may overrule the code. This is passed on to the workers. Default: False.

    Raises:
        ConfigError: If a layer contains an unknown setting.
    """
    merged: dict[str, SettingValue] = {}
    for layer in layers:
        for name, value in layer.items():
            if name not in SETTINGS:
                raise ConfigError(f"{name} ({value.origin}) is not a setting{suggest_word(name, list(SETTINGS))}")
            merged.setdefault(name, value)  # the first layer that sets it has the highest precedence
    config = LaunchConfig(**{name: entry.value for name, entry in merged.items()})
    return ResolvedSettings(config, {name: entry.origin for name, entry in merged.items()}, force)


def read_environment_layer(environment: Mapping[str, str]) -> dict[str, SettingValue]:
    """Return the settings in HEADWAY_* variables, each with its origin. Empty variables are ignored.

    Args:
        environment: Environment variables by name.

    Raises:
        ConfigError: If a value is invalid, or a variable looks like a misspelled setting.
    """
    variables = {setting.variable: setting for setting in SETTINGS.values() if setting.is_for_files}
    known = variables | {env.PREFIX + earlier.upper(): SETTINGS[name] for earlier, name in EARLIER_NAMES.items()}
    layer = {}
    # Earlier names are read first, so that the current name overrides them.
    for variable in sorted(environment, key=lambda each: (each in variables, each)):
        if not variable.startswith(env.PREFIX) or variable in _OTHER_VARIABLES:
            continue
        origin = f"environment: {variable}"
        if variable in known:
            setting = known[variable]
            if environment[variable].strip():
                layer[setting.name] = SettingValue(parse_text(setting, environment[variable], origin), origin)
            continue
        names = [setting.name for setting in variables.values()]
        similar_names = find_similar_words(variable.removeprefix(env.PREFIX), names)
        if similar_names:
            suggestion = " or ".join(SETTINGS[name].variable for name in similar_names)
            raise ConfigError(
                f"the environment variable {variable} is not a setting; did you mean {suggestion}? Rename it"
            )
    return layer


def read_function_layer(environment: Mapping[str, str]) -> dict[str, SettingValue]:
    """Return the settings in HEADWAY_* variables that apply to a function launched from a notebook.

    Settings of several machines and of the started program are left out, because the launching function chooses them.

    Args:
        environment: Environment variables by name.

    Raises:
        ConfigError: If a value is invalid, or a variable looks like a misspelled setting.
    """
    layer = read_environment_layer(environment)
    return {name: value for name, value in layer.items() if SETTINGS[name].group not in FIXED_FOR_FUNCTIONS}


def encode_payload(
    resolved: ResolvedSettings,
    num_processes: int,
    min_processes: int | None = None,
    device: str | None = None,
    ranks_per_machine: int | None = None,
) -> str:
    """Return the JSON text that passes a run's settings to its workers.

    Args:
        resolved: Merged configuration.
        num_processes: Number of processes over all machines.
        min_processes: Smallest number of processes with which the run may continue after losing machines. None: all.
        device: torch device type whose devices were counted to choose this machine's number of workers. None: devices
            were not counted.
        ranks_per_machine: Number of ranks on each machine, for layouts whose shards span one machine ("hsdp"). None:
            there is only one machine.
    """
    settings = {
        name: {"value": resolved.get(name), "origin": resolved.get_origin(name)}
        for name, setting in SETTINGS.items()
        if setting.is_for_workers and resolved.config.is_set(name)
    }
    content = {
        "version": _PAYLOAD_VERSION,
        "settings": settings,
        "num_processes": num_processes,
        "force": resolved.force,
    }
    if min_processes not in (None, num_processes):
        content["min_processes"] = min_processes
    if device is not None:
        content["device"] = device
    if ranks_per_machine not in (None, num_processes):
        content["ranks_per_machine"] = ranks_per_machine
    return json.dumps(content, separators=(",", ":"))


def _read_payload() -> dict[str, Any] | None:
    """Return the settings that the launcher has passed in an environment variable, or None if there are none.

    Raises:
        ConfigError: If the variable does not contain settings of this version of Headway.
    """
    text = env.get(env.PAYLOAD)
    if not text:
        return None
    content: dict[str, Any] | None = None
    with suppress(ValueError):
        content = parse_json(text)
    if not _is_payload(content):
        raise ConfigError(
            f"the environment variable {env.PAYLOAD} does not contain a payload of this version of Headway: {text[:80]!r}. Only "
            "the launcher sets it, so unset it, or start the script with `headway launch` of this installation"
        )
    return content


def _is_payload(content: Any) -> bool:
    """Whether a JSON value has the structure of the launcher's payload of this version."""
    if (
        not isinstance(content, dict)
        or content.get("version") != _PAYLOAD_VERSION
        or type(content.get("force")) is not bool
    ):
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


def read_requested_num_processes() -> range | None:
    """Return the range of allowed numbers of processes, which `headway launch` passes to its workers.

    Return None if the script was not started by the launcher.

    Raises:
        ConfigError: If the launcher's payload cannot be read.
    """
    content = _read_payload()
    if content is None:
        return None
    max_processes = content["num_processes"]
    min_processes = content.get("min_processes", max_processes)
    return range(min_processes, max_processes + 1)


def read_promised_device() -> str | None:
    """Return the torch device type that the launcher found for this process, or "cpu" if it found no device.

    Return None if the launcher did not look for devices, or if the script was not started by the launcher.

    Raises:
        ConfigError: If the launcher's payload cannot be read.
    """
    device = (_read_payload() or {}).get("device")
    return None if device is None else str(device)


def read_ranks_per_machine() -> int | None:
    """Return the number of processes on each machine.

    Return None if there is a single machine, or if the script was not started by the launcher.

    Raises:
        ConfigError: If the launcher's payload cannot be read.
    """
    number = (_read_payload() or {}).get("ranks_per_machine")
    return None if number is None else int(number)


def resolve_run_setting(
    name: str,
    code_value: Any,
    default: Any,
    *,
    code_origin: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> SettingValue:
    """Return the value of one setting and its origin, in a worker process.

    The script's value takes precedence over the launcher's. But if the command line sets another value, this is an error,
    or with `--force` the command line takes precedence. Without a launcher, the variable HEADWAY_<NAME> is read if the
    script gives no value.

    Args:
        name: Name of the setting, such as "mixed_precision".
        code_value: Value that the script gives; UNSET or None if it gives none.
        default: Value to return if no source sets the setting.
        code_origin: Description of the script's line for error messages, such as "Accelerator(mixed_precision='fp16')
            at train.py:12". Default: None, a description of name and value.
        parse: Function that parses the environment variable HEADWAY_<NAME>, for a setting that the launcher does not
            know. Default: None, the variable's text is the value.

    Returns:
        Value and origin. The origin is "default" if no source sets the setting.

    Raises:
        ConfigError: If the script contradicts the command line without `--force`, the text of the environment variable
            is invalid, or the launcher's payload cannot be read.
    """
    has_code_value = not (isinstance(code_value, Unset) or code_value is None)
    content = _read_payload()
    launched = None if content is None else content["settings"].get(name)
    origin = code_origin or f"{name}={code_value!r} in the code"
    if launched is not None:
        launched_value = SettingValue(
            check_file_value(SETTINGS[name], launched["value"], launched["origin"]), launched["origin"]
        )
        if not has_code_value:
            return launched_value
        if launched_value.origin.startswith(COMMAND_LINE) and launched_value.value != code_value:
            assert content is not None
            if content["force"]:
                return launched_value
            raise ConfigError(_format_conflict(name, launched_value, origin))
    if has_code_value:
        return SettingValue(code_value, f"code: {origin}")
    if content is None:
        return _read_environment(name, default, parse)
    return SettingValue(default, "default")


def _format_conflict(name: str, launched: SettingValue, origin: str) -> str:
    """Return the error message for a setting that code or environment and the command line set to different values."""
    flag = f"--{name}" if launched.value is True else f"--{name} {launched.value}"
    return (
        f"{origin} against {flag} on the command line: take one of them out, "
        "or add --force to `headway launch` to let the command line win"
    )


def _read_environment(name: str, default: Any, parse: Callable[[str], Any] | None) -> SettingValue:
    """Return a setting's value from its environment variable, and the origin of the value, for messages.

    Earlier names of the variable are accepted. Empty variables count as unset.

    Args:
        name: Name of the setting.
        default: Value if no variable is set.
        parse: Function that converts the text of a setting that is not in `SETTINGS`, and raises ValueError if it cannot.
            None: the text itself.

    Raises:
        ConfigError: If the text is not valid for the setting.
    """
    names = [name, *(earlier for earlier, current in EARLIER_NAMES.items() if current == name)]
    variables = [env.PREFIX + each.upper() for each in names]
    variable = next((each for each in variables if (env.get(each) or "").strip()), None)
    if variable is None:
        return SettingValue(default, "default")
    text = str(env.get(variable))
    origin = f"environment: {variable}"
    if name in SETTINGS:
        return SettingValue(parse_text(SETTINGS[name], text, origin), origin)
    if parse is None:
        return SettingValue(text, origin)
    try:
        return SettingValue(parse(text), origin)
    except ValueError:
        message = f"the environment variable {variable}={text!r} cannot be read as {name}; correct or unset it"
        raise ConfigError(message) from None
