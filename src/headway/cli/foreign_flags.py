"""Accelerate's launch flags for layouts, which the help does not show. Each is translated, ignored or refused."""

from collections.abc import Mapping
from typing import Any

import click

from headway.cli.options import (
    GroupedOption,
)
from headway.compat.accelerate.launching import layout_words
from headway.core.config.launch import SETTINGS
from headway.core.config.load import COMMAND_LINE, SettingValue
from headway.core.config.mesh import ENGINES
from headway.core.config.parallelism import LayoutRequest
from headway.errors import ConfigError

_SWITCH_FLAGS = ("use_fsdp", "use_parallelism_config", "use_deepspeed")
"""Names of Accelerate's flags without a value."""

_PLUGIN_ONLY_KEYS = (
    "limit_all_gathers param_init_fn state_dict_config optim_state_dict_config mixed_precision_policy".split()  # noqa: SIM905
)
"""Names of FSDP options that exist only as fields of the plugin, not as flags."""

VALUE_FLAGS = (
    *(f"fsdp_{key}" for key in layout_words.FSDP_KEYS if key not in _PLUGIN_ONLY_KEYS),
    *(f"parallelism_config_{key}" for key in layout_words.SIZE_KEYS),
    *layout_words.DEEPSPEED_KEYS,
)
"""Names of Accelerate's flags with a value. Some of them are also settings of Headway."""


def make_foreign_options() -> list[click.Parameter]:
    """Return hidden command-line options for Accelerate's layout flags whose names are not settings of Headway."""
    return [
        *(GroupedOption([f"--{name}"], is_flag=True, default=None, hidden=True) for name in _SWITCH_FLAGS),
        *(GroupedOption([f"--{name}"], hidden=True) for name in VALUE_FLAGS if name not in SETTINGS),
    ]


def translate_foreign_flags(
    flag_values: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, SettingValue], tuple[str, ...]]:
    """Translate Accelerate's flags for layouts to Headway's settings.

    The setting `strategy` is only among the results if `--strategy` was not given.

    Args:
        flag_values: Values from the command line by flag name; None if a flag was not given.

    Returns:
        The remaining flags, the settings from Accelerate's flags, and notes on flags without effect.

    Raises:
        ConfigError: If a flag is not supported, a value is invalid, or two flags contradict each other.
    """
    accelerate_flags = {
        name: value for name, value in flag_values.items() if name in _SWITCH_FLAGS or name in VALUE_FLAGS
    }
    own_flags = {name: value for name, value in flag_values.items() if name not in accelerate_flags}
    request = LayoutRequest()
    for name, value in accelerate_flags.items():
        if value is None:
            continue
        if name == "use_fsdp":
            request.use_shards("--use_fsdp")
        elif name == "use_deepspeed":
            request.use_deepspeed("--use_deepspeed")
        elif name in layout_words.DEEPSPEED_KEYS:
            layout_words.read_deepspeed(request, name, value, f"--{name}")
        elif name.startswith("fsdp_"):
            layout_words.read_fsdp(request, name.removeprefix("fsdp_"), value, f"--{name}")
        elif name != "use_parallelism_config":
            layout_words.read_size(request, name.removeprefix("parallelism_config_"), value, f"--{name}")
    for key, reason in request.refused.items():
        raise ConfigError(f"{key}: {reason}")
    settings = {name: SettingValue(value, f"{COMMAND_LINE}: {key}") for name, (value, key) in request.settings.items()}
    strategy = request.find_strategy()
    if strategy is not None:
        _check_agreement(own_flags.get("strategy"), strategy)
        if own_flags.get("strategy") is None:
            settings["strategy"] = SettingValue(strategy[0], f"{COMMAND_LINE}: {strategy[1]}")
    return own_flags, settings, ((f"without effect: {'; '.join(request.ignored)}",) if request.ignored else ())


def _check_agreement(typed_strategy: str | None, requested: tuple[str, str]) -> None:
    """Raise `ConfigError` if Accelerate's flags and `--strategy` request contradicting layouts.

    `--use_fsdp --strategy fsdp+tp=2` do not contradict each other; `--use_fsdp --strategy ddp` do.

    Args:
        typed_strategy: Layout given by `--strategy`, or None.
        requested: Pair of (layout that Accelerate's flags request, text of these flags).
    """
    layout, flags = requested
    if typed_strategy is None or layout == typed_strategy:
        return
    by_deepspeed = layout == "deepspeed" and typed_strategy.lower() in ENGINES
    by_shards = layout == "fsdp" and ("fsdp" in typed_strategy.lower() or "hsdp" in typed_strategy.lower())
    if not by_deepspeed and not by_shards:
        raise ConfigError(f"--strategy {typed_strategy} contradicts {layout} from {flags}; remove one of them")
