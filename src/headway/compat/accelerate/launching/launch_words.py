"""Variables that other libraries read, as Accelerate's launcher sets them."""

from collections.abc import Mapping
from typing import Any

from headway.common import env
from headway.compat.accelerate.layouts import DistributedType
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_FORBIDDEN = frozenset(";\n<> ")


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read weights on one process only, if models are sharded."""
    use = env.get("ACCELERATE_USE_FSDP") or "True"
    env.change({"ACCELERATE_USE_FSDP": use, "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read weights on all processes."""
    env.change({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines "NAME=value"; empty ones and those with a space, `;`, `<`, `>` or a line's end are left out with a warning."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _FORBIDDEN & set(name + value):
            lines.append(f"{name}={value}\n")
        else:
            log.warning(
                "%s=%s is left out: it is empty, or has a character that a list of variables cannot hold", name, value
            )
    return lines


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin of a state whose Accelerator runs DeepSpeed.

    Raises:
        ConfigError: it does not.
    """
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(f"there is no active DeepSpeedPlugin: the run is {state.distributed_type}, not DEEPSPEED")
    return state.deepspeed_plugin
