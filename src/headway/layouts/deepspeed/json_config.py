"""DeepSpeed's JSON configuration with access by dotted names. This module does not import torch."""

import base64
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from headway.common.untrusted import parse_json, shorten_repr
from headway.errors import ConfigError

AUTO = "auto"
"""Value in DeepSpeed's JSON for settings that are filled in from the run."""


class HfDeepSpeedConfig:
    """DeepSpeed's JSON configuration with access by dotted names, as in transformers and Accelerate.

    Args:
        config_file_or_dict: A dict, a path, JSON text or its base64 encoding, or another `HfDeepSpeedConfig`. The
            argument is copied.

    Attributes:
        config: JSON as a dict.

    Raises:
        ConfigError: If the argument has another type. Also if a string is neither the path of a file, nor JSON, nor
            base64 of JSON; if the file is not JSON; or if the JSON is not an object.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read_config(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the section of the JSON that contains a dotted name, and the name's last component.

        Args:
            ds_key_long: Dotted name, such as "zero_optimization.stage".

        Returns:
            Pair of (section, last component). The section is None if the JSON does not contain it.
        """
        node: Any = self.config
        *sections, key = ds_key_long.split(".")
        for section in sections:
            node = node.get(section) if isinstance(node, Mapping) else None
        return (node if isinstance(node, Mapping) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted name in the JSON, or the default if the name is missing.

        Args:
            ds_key_long: Dotted name, such as "zero_optimization.stage".
            default: Value to return if the name is missing. Default: None.
        """
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value at a dotted name in the JSON. Missing sections are created.

        Args:
            ds_key_long: Dotted name, such as "zero_optimization.stage".
            value: New value.
        """
        node = self.config
        *sections, key = ds_key_long.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the value or section at a dotted name from the JSON.

        Args:
            ds_key_long: Dotted name, such as "zero_optimization.stage".
            must_exist: Whether to raise an error if the name is missing. Default: False.

        Raises:
            ConfigError: If the name is missing and `must_exist` is set.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            if must_exist:
                raise ConfigError(f"DeepSpeed's configuration has no {ds_key_long!r}")
            return
        del node[key]

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the JSON sets a dotted name to a true value. False if the name is missing."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the JSON sets a dotted name to a false value. False if the name is missing."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the JSON sets a dotted name to "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero2(self) -> bool:
        """Whether the JSON sets ZeRO stage 2."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether the JSON sets ZeRO stage 3."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether the JSON offloads parameters or optimizer state to host memory or NVMe."""
        kinds = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{kind}.device") in ("cpu", "nvme") for kind in kinds)


def _read_config(config: Any) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration as a dict.

    Args:
        config: A dict, an object with such a dict as its attribute `config`, a path, JSON text or its base64 encoding.

    Raises:
        ConfigError: If the argument has another type, or if its JSON is invalid or is not an object.
    """
    if isinstance(config, Mapping):
        return deepcopy(dict(config))
    if isinstance(getattr(config, "config", None), Mapping):
        return deepcopy(dict(config.config))
    if not isinstance(config, str | Path):
        raise ConfigError(
            f"hf_ds_config is a {type(config).__name__}; give a dict, the path of a JSON file, or an HfDeepSpeedConfig"
        )
    text, source = str(config), "hf_ds_config"
    try:
        if Path(config).is_file():
            text, source = Path(config).read_text(encoding="utf-8"), str(config)
    except (OSError, ValueError):  # JSON text, too long for a path
        pass
    parsed = _parse_config(text, source)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{source} holds a {type(parsed).__name__}; DeepSpeed's configuration is a JSON object")
    return parsed


def _parse_config(text: str, source: str) -> Any:
    """Parse JSON text, or base64 of JSON text if it does not come from a file.

    Args:
        text: Text of a file, or the string that was given instead of a path.
        source: Path of the file, or "hf_ds_config" if `text` is the given string. For error messages.

    Raises:
        ConfigError: If the text is not in an allowed format.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        if source != "hf_ds_config" or text.lstrip().startswith("{"):
            raise ConfigError(f"{source} is not JSON: {error}") from None
    try:
        return parse_json(base64.b64decode(text, altchars=b"-_", validate=True))
    except ValueError:
        raise ConfigError(
            f"hf_ds_config={shorten_repr(text)}: there is no such file, and it is neither JSON nor base64 of JSON"
        ) from None
