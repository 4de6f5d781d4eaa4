"""Reading of `accelerator_config`: Headway's names, and the names that transformers' `AcceleratorConfig` has."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from headway.core.config.run import DataLoaderConfiguration
from headway.errors import ConfigError

LOADER_NAMES = frozenset(field.name for field in fields(DataLoaderConfiguration))
"""Names that set a field of `DataLoaderConfiguration`, such as "split_batches"."""
ACCUMULATION = "gradient_accumulation_kwargs"
"""Name of the setting with the options of gradient accumulation."""
_ACCUMULATION_DEFAULTS = {"adjust_scheduler": False, "sync_with_dataloader": True}
"""Fields of `GradientAccumulationPlugin` that the Trainer's loop determines, with the only value that it supports."""


def read_accelerator_config(value: Any) -> dict[str, Any] | None:
    """Return `accelerator_config` as a dict.

    `use_configured_state` is left out, because an Accelerator always uses the process group and device that exist.

    Args:
        value: A dict, the path of a JSON file, JSON text, or an object such as transformers' `AcceleratorConfig`. Of an
            object, only the fields whose values differ from their defaults count. None: no settings.

    Raises:
        ConfigError: If the value or the content of the file is not a dict, settings contradict each other, or
            `even_batches` is True.
    """
    if value is None:
        return None
    if is_dataclass(value) and not isinstance(value, type):
        config: Any = _read_changed_fields(value)
    elif isinstance(value, str | Path):
        config = _read_json(str(value))
    else:
        config = value
    if not isinstance(config, Mapping):
        raise ConfigError(f"accelerator_config={config!r}; give a dict, the path of a JSON file, or None")
    settings = {name: setting for name, setting in config.items() if name != "use_configured_state"}
    if settings.get("even_batches"):
        raise ConfigError(
            "accelerator_config sets even_batches=True, which repeats rows to fill up the last batch, so that evaluations would "
            "count them twice; leave it out: the Trainer needs no repeated rows"
        )
    loader_names = sorted(LOADER_NAMES & settings.keys())
    if loader_names and settings.get("dataloader_config") is not None:
        raise ConfigError(
            f"accelerator_config sets {loader_names[0]} and dataloader_config, which has a field of this name; give one of them"
        )
    _check_accumulation(settings)
    return settings


def _read_changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object whose values differ from their defaults, by name."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name, default)
        if value != default:
            changed[field.name] = value
    return changed


def _read_json(text: str) -> Any:
    """Return the JSON value that a text contains, or that the file at this path contains.

    Raises:
        ConfigError: If the file cannot be read, or there is no valid JSON.
    """
    try:
        is_json = text.lstrip().startswith("{")
        return json.loads(text if is_json else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"accelerator_config={text!r} cannot be read ({error}); give a dict or the path of a JSON file"
        ) from error


def _check_accumulation(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the accumulation options of `accelerator_config` are invalid or not supported."""
    options = config.get(ACCUMULATION)
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(f"accelerator_config has {ACCUMULATION}={options!r}; give a dict")
    if config.get("gradient_accumulation_plugin") is not None:
        raise ConfigError(f"accelerator_config sets {ACCUMULATION} and gradient_accumulation_plugin; give one of them")
    for name, value in options.items():
        is_default = name in _ACCUMULATION_DEFAULTS and value == _ACCUMULATION_DEFAULTS[name]
        if name not in ("num_steps", "sync_each_batch") and not is_default:
            raise ConfigError(
                f"accelerator_config has {ACCUMULATION} with {name}={value!r}; allowed: num_steps (another name of the argument "
                "gradient_accumulation_steps) and sync_each_batch"
            )


def pop_accumulation_steps(config: dict[str, Any] | None, steps: int) -> int:
    """Remove `num_steps` from the config's options of gradient accumulation, and return the number of micro-batches.

    Args:
        config: Result of `read_accelerator_config`, which is changed. None if the argument was not given.
        steps: Argument `gradient_accumulation_steps`, which is returned if the config has no number.

    Raises:
        ConfigError: If both are given and differ.
    """
    options = dict((config or {}).get(ACCUMULATION) or {})
    if config is None or "num_steps" not in options:
        return steps
    num_steps: int = options.pop("num_steps")
    config[ACCUMULATION] = options
    if steps not in (1, num_steps):  # 1 is the default of the argument
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts num_steps={num_steps!r} in accelerator_config; give "
            "gradient_accumulation_steps alone"
        )
    return num_steps


def splits_batches(config: object) -> bool:
    """Whether a loader's batch size is that of all processes together, which `split_batches` requests.

    Args:
        config: Value of `accelerator_config`, from `read_accelerator_config`.
    """
    if not isinstance(config, Mapping):
        return False
    loading = config.get("dataloader_config")
    return bool(config.get("split_batches")) or bool(getattr(loading, "split_batches", False))
