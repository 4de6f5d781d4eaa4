"""Find, read and write the config file that `headway config` creates and `headway launch` reads settings from."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.untrusted import read_regular_file, shorten_repr
from headway.core.config.launch import EARLIER_NAMES, SETTINGS, LaunchConfig
from headway.core.config.load import SettingValue
from headway.core.config.values import check_file_value, suggest_word
from headway.errors import ConfigError

FILE_NAME = "default_config.yaml"
KEYS = tuple(setting.name for setting in SETTINGS.values() if setting.is_for_files)
"""Names of the settings that may appear in a config file."""

_MAX_BYTES = 2**20
"""Maximum size of a config file, in bytes."""

_MAX_DEPTH = 18
"""Maximum nesting depth of a config file, including the levels of the YAML stream and document."""


_MAX_VALUE_LENGTH = 1000
"""Maximum number of characters in an unquoted value. Python refuses to convert integers with more than 4300 digits."""


def find_default_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the default config file, to which `headway config` writes.

    Its folder is $HEADWAY_HOME, else $XDG_CONFIG_HOME/headway, else ~/.config/headway.
    """
    if environment.get("HEADWAY_HOME"):
        folder = Path(environment["HEADWAY_HOME"])
    elif environment.get("XDG_CONFIG_HOME"):
        folder = Path(environment["XDG_CONFIG_HOME"], "headway")
    else:
        folder = Path(environment.get("HOME") or "~").expanduser() / ".config" / "headway"
    return folder / FILE_NAME


Explain = Callable[[str], str]
"""Function that returns a hint for an unknown key, such as "; did you mean cpu?", or "" if it has no hint."""


def _explain_nothing(key: str) -> str:
    return ""


def read_file_layer(
    file: str | None, environment: Mapping[str, str], explain: Explain = _explain_nothing
) -> dict[str, SettingValue]:
    """Return the settings in the config file, each with its origin.

    Args:
        file: Path that the user gave. None: the default file if it exists.
        environment: Environment variables, which determine the default file.
        explain: Function that returns hints for unknown keys that belong to another library. Default: no hints.

    Raises:
        ConfigError: If `file` does not exist, or the file cannot be read or contains an unknown key or an invalid
            value.
    """
    path = Path(file) if file is not None else find_default_file(environment)
    if file is None and not os.path.exists(path):  # os.path.exists is False, not an error, if the path is too long
        return {}
    content = read_config(path)
    return parse_config(content, _find_original_name(content) or str(path), explain)


_TRANSLATION_COMMENT = "# Translated by Headway from "
"""Start of the first line of a config file that was translated from another library's file, whose name follows."""


def _find_original_name(content: bytes) -> str:
    """Return the name of the file from which this config file was translated, with " (translated)" appended.

    Return "" if the content was not translated from another library's config file.
    """
    first_line = content.partition(b"\n")[0].decode("utf-8", "replace")
    if not first_line.startswith(_TRANSLATION_COMMENT):
        return ""
    return f"{first_line.removeprefix(_TRANSLATION_COMMENT).strip()} (translated)"


def read_config(path: Path) -> bytes:
    """Return the content of a config file.

    Raises:
        ConfigError: If the file cannot be read.
    """
    try:
        return read_regular_file(path, _MAX_BYTES, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"the config file {error}; correct the path") from error


def load_mapping(content: bytes, name: str) -> dict[str, Any]:
    """Parse YAML or JSON into a mapping. Empty content gives an empty mapping.

    Args:
        content: YAML or JSON. It is untrusted.
        name: Name of the file, for messages.

    Raises:
        ConfigError: If the content is neither YAML nor JSON, or is not a mapping with string keys. Also if it contains
            a YAML alias, deep nesting or a very long unquoted value, which could exhaust memory or time.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(content, Loader=loader), name)
        data = yaml.load(content, Loader=loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        # PyYAML's constructors pass on Python's errors for a value that does not fit its tag, such as `!!bool maybe`.
        reason = f"{error} is not a value of its kind" if isinstance(error, LookupError) else str(error)
        raise ConfigError(f"the config file {name} is not valid YAML: {' '.join(reason.split())[:200]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"the config file {name} must hold one setting a line, `name: value`, not a {type(data).__name__}"
        )
    return data


def _check_events(events: Iterable[Any], name: str) -> None:
    """Raise `ConfigError` for YAML that would exhaust the stack or memory, or take very long to parse.

    Such YAML contains deep nesting, aliases or huge numbers.

    Args:
        events: Events of PyYAML's parser.
        name: Name of the file, for messages.

    Raises:
        ConfigError: If the content contains such YAML.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__  # such as MappingStartEvent
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _MAX_DEPTH:
            raise ConfigError(
                f"the config file {name} is nested more than {_MAX_DEPTH - 2} levels deep; write one setting per line"
            )
        if kind == "ScalarEvent" and not event.style and len(event.value) > _MAX_VALUE_LENGTH:
            raise ConfigError(
                f"the config file {name} contains a number or word that no setting accepts: {shorten_repr(event.value)}"
            )
        if kind == "AliasEvent":
            raise ConfigError(
                f"the config file {name} uses the alias *{event.anchor}; write the value out in its place"
            )


def parse_config(content: bytes, name: str, explain: Explain = _explain_nothing) -> dict[str, SettingValue]:
    """Return the settings in a config file's content, each with its origin.

    Args:
        content: YAML or JSON.
        name: Name of the file in origins and errors.
        explain: Function that returns hints for unknown keys that belong to another library. Default: no hints.

    Raises:
        ConfigError: If the content cannot be parsed, or contains an unknown key or an invalid value.
    """
    return read_settings(load_mapping(content, name), name, explain)


def read_settings(
    mapping: Mapping[str, Any], name: str, explain: Explain = _explain_nothing
) -> dict[str, SettingValue]:
    """Return the settings in a parsed config file, each with its origin. Keys with a null value are left out.

    If a setting occurs under an earlier and under its current name, the current name counts.

    Args:
        mapping: Keys and values of the file.
        name: Name of the file in origins and errors.
        explain: Function that returns hints for unknown keys that belong to another library. Default: no hints.

    Raises:
        ConfigError: If a key is unknown or a value is invalid.
    """
    layer = {}
    for written_key, value in mapping.items():
        origin = f"file: {name} key {written_key}"
        key = EARLIER_NAMES.get(written_key, written_key)
        if key not in KEYS:
            hint = explain(key) or suggest_word(key, list(KEYS)) or f"; there are {', '.join(KEYS)}"
            raise ConfigError(f"{key} ({origin}) is not a setting{hint}")
        is_overridden = key != written_key and mapping.get(key) is not None  # by its current name in the same file
        if value is not None and not is_overridden:  # `key:` without a value does not set the key
            layer[key] = SettingValue(check_file_value(SETTINGS[key], value, origin), origin)
    return layer


def format_config(config: LaunchConfig, original: str | None = None) -> str:
    """Format settings as the text of a config file, one per line, which `parse_config` reads back exactly.

    Args:
        config: Settings to write.
        original: Name of another library's config file, if the settings were translated from it. Error messages then
            name that file as the origin. Default: None, the settings were not translated.
    """
    import yaml

    lines = ["# Written by `headway config`; `headway config show` prints each value with its origin."]
    if original:
        lines.insert(0, f"{_TRANSLATION_COMMENT}{' '.join(original.split())}")
    for key in KEYS:
        if config.is_set(key):
            value = getattr(config, key)
            # Without quotes, YAML would read 'no' as False.
            style = '"' if isinstance(value, str) else None
            text = yaml.safe_dump(value, default_style=style, width=2**30).removesuffix("...\n")
            lines.append(f"{key}: {text.strip()}")
    return "\n".join(lines) + "\n"


def write_config(config: LaunchConfig, path: Path, original: str | None = None) -> None:
    """Write a config file atomically, creating its folder.

    Args:
        config: Settings to write.
        path: File to create or replace.
        original: Name of another library's config file, if the settings were translated from it. Error messages then
            name that file as the origin. Default: None, the settings were not translated.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, format_config(config, original))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be written: {error.strerror or error}") from error
