"""Accelerate's launch flags for layouts, which the help does not show. Each is translated, ignored or refused."""

from collections.abc import Mapping
from typing import Any

import click

from headway.cli.options import (
    GroupedOption,
)
from headway.compat.accelerate.launching import layout_words
from headway.core.config.launch import SETTINGS
from headway.core.config.layout_request import LayoutRequest, RequestedValue
from headway.core.config.load import COMMAND_LINE, SettingValue
from headway.core.config.mesh import ENGINES
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


def make_accelerate_options() -> list[click.Parameter]:
    """Return hidden command-line options for Accelerate's layout flags whose names are not settings of Headway."""
    return [
        *(GroupedOption([f"--{name}"], is_flag=True, default=None, hidden=True) for name in _SWITCH_FLAGS),
        *(GroupedOption([f"--{name}"], hidden=True) for name in VALUE_FLAGS if name not in SETTINGS),
    ]


def translate_accelerate_flags(
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
    request = _read_layout_request(accelerate_flags)
    for flag, reason in request.refused.items():
        raise ConfigError(f"{flag}: {reason}")  # the first one; the user sees the next one in the next try
    settings = {
        name: SettingValue(requested.value, f"{COMMAND_LINE}: {requested.key}")
        for name, requested in request.settings.items()
    }
    strategy = request.find_strategy()
    if strategy is not None:
        typed_strategy = own_flags.get("strategy")
        _check_agreement(typed_strategy, strategy)
        if typed_strategy is None:
            settings["strategy"] = SettingValue(strategy.value, f"{COMMAND_LINE}: {strategy.key}")
    notes = (f"without effect: {'; '.join(request.ignored)}",) if request.ignored else ()
    return own_flags, settings, notes


def _read_layout_request(accelerate_flags: Mapping[str, Any]) -> LayoutRequest:
    """Return the layout that Accelerate's flags request.

    Args:
        accelerate_flags: Values by flag name; None if a flag was not given.
    """
    request = LayoutRequest()
    for name, value in accelerate_flags.items():
        if value is None:
            continue
        flag = f"--{name}"
        if name == "use_fsdp":
            request.use_shards(flag)
        elif name == "use_deepspeed":
            request.use_deepspeed(flag)
        elif name == "use_parallelism_config":
            pass  # the sizes of the axes, which have flags of their own, request the layout
        elif name in layout_words.DEEPSPEED_KEYS:
            layout_words.read_deepspeed(request, name, value, flag)
        elif name.startswith("fsdp_"):
            layout_words.read_fsdp(request, name.removeprefix("fsdp_"), value, flag)
        else:
            layout_words.read_size(request, name.removeprefix("parallelism_config_"), value, flag)
    return request


def _check_agreement(typed_strategy: str | None, requested: RequestedValue) -> None:
    """Raise `ConfigError` if Accelerate's flags and `--strategy` request contradicting layouts.

    `--use_fsdp --strategy fsdp+tp=2` do not contradict each other; `--use_fsdp --strategy ddp` do.

    Args:
        typed_strategy: Layout given by `--strategy`, or None.
        requested: Layout that Accelerate's flags request, with these flags.
    """
    layout: str = requested.value
    if typed_strategy is None or layout == typed_strategy:
        return
    by_deepspeed = layout == "deepspeed" and typed_strategy.lower() in ENGINES
    by_shards = layout == "fsdp" and ("fsdp" in typed_strategy.lower() or "hsdp" in typed_strategy.lower())
    if not by_deepspeed and not by_shards:
        raise ConfigError(f"--strategy {typed_strategy} contradicts {layout} from {requested.key}; remove one of them")
