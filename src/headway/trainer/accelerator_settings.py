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
_ACCUMULATION_DEFAULTS = {"adjust_scheduler": False, "sync_with_dataloader": True}
"""Fields of `GradientAccumulationPlugin` that the Trainer's loop determines, with the only value that it supports."""


def read_accelerator_config(given: Any) -> dict[str, Any] | None:
    """Return `accelerator_config` as a dict.

    `use_configured_state` is left out, because an Accelerator always uses the process group and device that exist.

    Args:
        given: A dict, the path of a JSON file, JSON text, or an object such as transformers' `AcceleratorConfig`. Of an
            object, only the fields whose values differ from their defaults count. None: no settings.

    Raises:
        ConfigError: If the value or the content of the file is not a dict, or settings contradict each other.
    """
    if given is None:
        return None
    if is_dataclass(given) and not isinstance(given, type):
        given = _list_changes(given)
    elif isinstance(given, str | Path):
        given = _read_json(str(given))
    if not isinstance(given, Mapping):
        raise ConfigError(f"accelerator_config={given!r}; give a dict, the path of a JSON file, or None")
    found = {name: value for name, value in given.items() if name != "use_configured_state"}
    if found.get("even_batches"):
        raise ConfigError(
            "accelerator_config sets even_batches=True, which repeats rows to fill up the last batch, so that evaluations would "
            "count them twice; leave it out: the Trainer needs no repeated rows"
        )
    both = sorted(LOADER_NAMES & found.keys())
    if both and found.get("dataloader_config") is not None:
        raise ConfigError(
            f"accelerator_config sets {both[0]} and dataloader_config, which has a field of this name; give one of them"
        )
    _check_accumulation(found)
    return found


def _list_changes(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(config, field.name, default)
        if value != default:
            found[field.name] = value
    return found


def _read_json(text: str) -> Any:
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"accelerator_config={text!r} cannot be read ({error}); give a dict or the path of a JSON file"
        ) from error


def _check_accumulation(config: Mapping[str, Any]) -> None:
    options = config.get(ACCUMULATION)
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(f"accelerator_config has {ACCUMULATION}={options!r}; give a dict")
    if config.get("gradient_accumulation_plugin") is not None:
        raise ConfigError(f"accelerator_config sets {ACCUMULATION} and gradient_accumulation_plugin; give one of them")
    allowed = {"num_steps", "sync_each_batch"}
    for name, value in options.items():
        if name not in allowed and not (name in _ACCUMULATION_DEFAULTS and value == _ACCUMULATION_DEFAULTS[name]):
            raise ConfigError(
                f"accelerator_config has {ACCUMULATION} with {name}={value!r}; allowed: num_steps (another name of the argument "
                "gradient_accumulation_steps) and sync_each_batch"
            )


def pop_accumulation_steps(config: dict[str, Any] | None, steps: int) -> int:
    """Remove `num_steps` from the config's options of gradient accumulation, and return the number of micro-batches.

    Args:
        config: Result of `read_accelerator_config`, which is changed.
        steps: Argument `gradient_accumulation_steps`, which is returned if the config has no number.

    Raises:
        ConfigError: If both are given and differ.
    """
    options = dict((config or {}).get(ACCUMULATION) or {})
    if config is None or "num_steps" not in options:
        return steps
    found: int = options.pop("num_steps")
    config[ACCUMULATION] = options
    if steps not in (1, found):
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts num_steps={found!r} in accelerator_config; give "
            "gradient_accumulation_steps alone"
        )
    return found


def splits_batches(config: object) -> bool:
    """Whether a loader's batch size is that of all processes together, which `split_batches` requests.

    Args:
        config: Value of `accelerator_config`, from `read_accelerator_config`.
    """
    if not isinstance(config, Mapping):
        return False
    loading = config.get("dataloader_config")
    return bool(config.get("split_batches")) or bool(getattr(loading, "split_batches", False))
