"""Small things around a script: variables (other libraries' too), sizes, ports, nested dicts, a progress bar, a first config file."""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from headway.common import env, optional
from headway.common.text import parse_bytes
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.state import PartialState
from headway.config.files import default_file, write
from headway.config.launch import PRECISIONS, LaunchConfig
from headway.errors import ConfigError
from headway.log import get_logger


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for "yes", "true", "on", "1" and their like, 0 for their opposites; with `to_bool` True and False.

    Raises:
        ConfigError: neither.
    """
    answer = env.parse_bool(value, "value")
    return answer if to_bool else int(answer)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable as a boolean; `default` if it is not set."""
    text = env.get(key)
    return bool(default) if text is None else bool(str_to_bool(text))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The environment variable's text; `default` if it is not set."""
    text = env.get(key)
    return str(default) if text is None else text


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """The first of the variables that is set to 0 or more; `default` if there is none."""
    found = (env.get_int(key) for key in env_keys)
    return next((value for value in found if value is not None and value >= 0), default)


def patch_environment(**kwargs: object) -> AbstractContextManager[None]:
    """Set environment variables for a block: names in capitals, values as text. The previous values are restored afterwards."""
    return env.patched({key.upper(): str(value) for key, value in kwargs.items()})


def clear_environment() -> AbstractContextManager[None]:
    """Run a block without any environment variable. They are restored afterwards."""
    return env.cleared()


def purge_accelerate_environment(func: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: Accelerate's and Headway's variables are restored after the function."""
    return _as_before()(func)


@contextmanager
def _as_before() -> Iterator[None]:
    before = _settings()
    try:
        yield
    finally:
        env.change({name: before.get(name) for name in {*before, *_settings()}})


def _settings() -> dict[str, str]:
    prefixes = ("ACCELERATE_", env.PREFIX)
    return {name: value for name, value in env.snapshot().items() if name.startswith(prefixes)}


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Which of these modules are imported."""
    return [name for name in library_names if name in sys.modules]


def convert_bytes(size: float) -> str:
    """Bytes in readable form: 1536 -> '1.5 KB', by powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of "5GB", "10MiB" or a number (see `headway.common.text.parse_bytes`); of "5Gb", as a small b is a bit, an eighth."""
    is_in_bits = isinstance(size, str) and size.endswith("b") and size[-2:-1].lower() in "kmg"
    return parse_bytes(size) // (8 if is_in_bits else 1)


def is_port_in_use(port: int | None = None) -> bool:
    """Is this port of localhost in use? None: 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a function or class, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination`, including nested dicts; returns `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """`obj.a.b` for "a.b"."""
    return reduce(getattr, attr.split("."), obj)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file that `headway launch` starts from: this machine, all its devices, the precision.

    Args:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        save_location: the file; None: the default one (see `headway config`).

    Returns:
        Its path; False where it is there already, which is left alone.

    Raises:
        ConfigError: another precision.
    """
    path = default_file(env.snapshot()) if save_location is None else Path(save_location)
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision={mixed_precision!r}; allowed: {', '.join(map(repr, PRECISIONS))}")
    if path.exists():
        print(f"{path} already exists and was left alone; edit it with `headway config`, or give another save_location")
        return False
    write(LaunchConfig(mixed_precision=precision), path)
    return path


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """tqdm.auto.tqdm, shown by the first process of each machine only; it iterates on every process.

    `headway.track` does the same without tqdm, and writes plain lines where nobody watches.

    Args:
        args, kwargs: for tqdm.
        main_process_only: False: every process shows its bar.

    Raises:
        ConfigError: a truth value in the place of what is iterated.
        OptionalDependencyMissing: tqdm is not installed.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...) is an old spelling: the first argument is what is iterated; write main_process_only={args[0]}"
        )
    bar = optional.require("tqdm.auto", "headway.tqdm shows its bars with", "tqdm").tqdm
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=hidden)


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
