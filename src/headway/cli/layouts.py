"""Accelerate's launch flags for layouts: accepted but not shown in the help, and each one translated, ignored or refused."""

from collections.abc import Mapping
from typing import Any

import click

from headway.cli.options import GroupedOption
from headway.compat.accelerate.launching.layout_words import (
    DEEPSPEED_KEYS,
    FSDP_KEYS,
    SIZE_KEYS,
    read_deepspeed,
    read_fsdp,
    read_size,
)
from headway.config.launch import SETTINGS
from headway.config.layout.mesh import ENGINES
from headway.config.layout.request import LayoutRequest
from headway.config.load import COMMAND_LINE, Value
from headway.errors import ConfigError

_SWITCHES = ("use_fsdp", "use_parallelism_config", "use_deepspeed")
_ONLY_OF_PLUGINS = tuple(
    """
    limit_all_gathers param_init_fn state_dict_config optim_state_dict_config mixed_precision_policy
    """.split()  # noqa: SIM905
)
_VALUES = (
    *(f"fsdp_{key}" for key in FSDP_KEYS if key not in _ONLY_OF_PLUGINS),
    *(f"parallelism_config_{key}" for key in SIZE_KEYS),
    *DEEPSPEED_KEYS,
)


def foreign_options() -> list[click.Parameter]:
    """The flags that Headway's own settings do not have."""
    return [
        *(GroupedOption([f"--{name}"], is_flag=True, default=None, hidden=True) for name in _SWITCHES),
        *(GroupedOption([f"--{name}"], hidden=True) for name in _VALUES if name not in SETTINGS),
    ]


def take_foreign(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Value], tuple[str, ...]]:
    """Read the flags for layouts by Accelerate's words.

    Args:
        given: click's parsed values, None where a flag was not given.

    Returns:
        The other flags, what these decide, and a note on those that change nothing.

    Raises:
        ConfigError: a flag that is refused, a value that cannot be, or two flags that contradict each other.
    """
    mine = {name: value for name, value in given.items() if name in _SWITCHES or name in _VALUES}
    rest = {name: value for name, value in given.items() if name not in mine}
    read = LayoutRequest()
    for name, value in mine.items():
        if value is None:
            continue
        if name == "use_fsdp":
            read.use_shards("--use_fsdp")
        elif name == "use_deepspeed":
            read.use_deepspeed("--use_deepspeed")
        elif name in DEEPSPEED_KEYS:
            read_deepspeed(read, name, value, f"--{name}")
        elif name.startswith("fsdp_"):
            read_fsdp(read, name.removeprefix("fsdp_"), value, f"--{name}")
        elif name != "use_parallelism_config":
            read_size(read, name.removeprefix("parallelism_config_"), value, f"--{name}")
    for key, reason in read.refused.items():
        raise ConfigError(f"{key}: {reason}")
    layer = {name: Value(value, f"{COMMAND_LINE}: {key}") for name, (value, key) in read.settings.items()}
    asked = read.strategy()
    if asked is not None:
        _check_one(rest.get("strategy"), asked)
        if rest.get("strategy") is None:
            layer["strategy"] = Value(asked[0], f"{COMMAND_LINE}: {asked[1]}")
    return rest, layer, ((f"without effect: {'; '.join(read.ignored)}",) if read.ignored else ())


def _check_one(typed: str | None, asked: tuple[str, str]) -> None:
    """`--use_fsdp --strategy fsdp+tp=2` is one wish; `--use_fsdp --strategy ddp` is two."""
    text, keys = asked
    by_deepspeed = text == "deepspeed" and typed is not None and typed.lower() in ENGINES
    if (
        typed is None
        or text == typed
        or by_deepspeed
        or (text == "fsdp" and ("fsdp" in typed.lower() or "hsdp" in typed.lower()))
    ):
        return
    raise ConfigError(f"--strategy {typed} contradicts {text} from {keys}; remove one of them")
