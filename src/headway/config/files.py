"""The config file: where it is, what it may hold, reading it as a layer of settings, and writing it."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.untrusted import read_regular, shown
from headway.config.launch import EARLIER_NAMES, SETTINGS, LaunchConfig
from headway.config.load import Value
from headway.config.values import did_you_mean, from_file
from headway.errors import ConfigError

FILE_NAME = "default_config.yaml"
KEYS = tuple(setting.name for setting in SETTINGS.values() if setting.is_for_files)

_LARGEST = 2**20
"""Bytes of a config file, at most."""

_DEEPEST = 18
"""Levels of nesting, with those of the stream and the document."""


_LONGEST = 1000
"""Characters of a value without quotes; numbers of more digits are none that Python prints."""


def default_file(environment: Mapping[str, str]) -> Path:
    """Where `headway config` writes: $HEADWAY_HOME, else $XDG_CONFIG_HOME/headway, else ~/.config/headway."""
    if environment.get("HEADWAY_HOME"):
        folder = Path(environment["HEADWAY_HOME"])
    elif environment.get("XDG_CONFIG_HOME"):
        folder = Path(environment["XDG_CONFIG_HOME"], "headway")
    else:
        folder = Path(environment.get("HOME") or "~").expanduser() / ".config" / "headway"
    return folder / FILE_NAME


Explain = Callable[[str], str]
"""From a key that is no setting to what to do, such as "; did you mean cpu?"; empty where nothing is known."""


def _explain_nothing(key: str) -> str:
    return ""


def file_layer(
    named: str | None, environment: Mapping[str, str], explain: Explain = _explain_nothing
) -> dict[str, Value]:
    """What the config file decides.

    Args:
        named: the file that was asked for; None: the default one, and nothing where it does not exist.
        environment: says where the default one is.
        explain: answers for keys that are another library's.

    Raises:
        ConfigError: a named file does not exist, or the file cannot be read, or holds an unknown key or a wrong value.
    """
    path = Path(named) if named is not None else default_file(environment)
    if named is None and not os.path.exists(path):  # which a name that is too long does not either
        return {}
    return parse(read(path), str(path), explain)


def read(path: Path) -> bytes:
    """The file's bytes.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_regular(path, _LARGEST, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"the config file {error}; correct the path") from error


def load_mapping(content: bytes, name: str) -> dict[str, Any]:
    """The file's YAML or JSON as a mapping.

    Raises:
        ConfigError: it is neither, or not a mapping with text keys.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_shape(yaml.parse(content, Loader=loader), name)
        data = yaml.load(content, Loader=loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        # PyYAML's constructors let through what Python raises on a value that its tag does not fit: `!!bool maybe`.
        what = f"{error} is not a value of its kind" if isinstance(error, LookupError) else str(error)
        raise ConfigError(f"the config file {name} is not valid YAML: {' '.join(what.split())[:200]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"the config file {name} must hold one setting a line, `name: value`, not a {type(data).__name__}"
        )
    return data


def _check_shape(events: Iterable[Any], name: str) -> None:
    """Refuse what would exhaust the stack, memory or time once it is put together: deep nesting, aliases of aliases, huge numbers.

    Raises:
        ConfigError: the content has one of them.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _DEEPEST:
            raise ConfigError(
                f"the config file {name} is nested more than {_DEEPEST - 2} levels deep; write one setting per line"
            )
        if kind == "ScalarEvent" and not event.style and len(event.value) > _LONGEST:
            raise ConfigError(
                f"the config file {name} holds a number or word that no setting takes: {shown(event.value)}"
            )
        if kind == "AliasEvent":
            raise ConfigError(
                f"the config file {name} uses the alias *{event.anchor}; write the value out in its place"
            )


def parse(content: bytes, name: str, explain: Explain = _explain_nothing) -> dict[str, Value]:
    """The settings that a config file's content decides.

    Args:
        content: YAML or JSON.
        name: what origins and errors call the file.

    Raises:
        ConfigError: not readable, an unknown key, or a wrong value.
    """
    return settings_in(load_mapping(content, name), name, explain)


def settings_in(mapping: Mapping[str, Any], name: str, explain: Explain = _explain_nothing) -> dict[str, Value]:
    """The settings that a config file's mapping decides.

    Raises:
        ConfigError: an unknown key, or a wrong value.
    """
    layer = {}
    for given, value in mapping.items():
        origin, key = f"file: {name} key {given}", EARLIER_NAMES.get(given, given)
        if key not in KEYS:
            hint = explain(key) or did_you_mean(key, list(KEYS)) or f"; there are {', '.join(KEYS)}"
            raise ConfigError(f"{key} ({origin}) is not a setting{hint}")
        if value is not None:  # `key:` with nothing behind it decides nothing
            layer[key] = Value(from_file(SETTINGS[key], value, origin), origin)
    return layer


def dump(config: LaunchConfig) -> str:
    """A config file's text: the decided settings, one a line, that `parse` reads back exactly."""
    import yaml

    lines = ["# Written by `headway config`; `headway config show` prints each value with its origin."]
    for key in KEYS:
        if config.is_set(key):
            value = getattr(config, key)
            # Quotes keep 'no' a word.
            style = '"' if isinstance(value, str) else None
            text = yaml.safe_dump(value, default_style=style, width=2**30).removesuffix("...\n")
            lines.append(f"{key}: {text.strip()}")
    return "\n".join(lines) + "\n"


def write(config: LaunchConfig, path: Path) -> None:
    """Write `config` to `path`; a reader sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, dump(config))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be written: {error.strerror or error}") from error
