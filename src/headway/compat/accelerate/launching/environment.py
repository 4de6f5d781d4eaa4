"""Small helpers for scripts: environment variables, sizes in bytes, ports, nested dicts, and config files."""

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from headway.common import env
from headway.common.text import parse_bytes
from headway.compat.accelerate.constants import DistributedType
from headway.core.config.files import find_default_file, write_config
from headway.core.config.launch import PRECISIONS, LaunchConfig
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_FORBIDDEN = frozenset(";\n<> ")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for "yes", "true", "on", "1" and similar words, and 0 for their opposites.

    Args:
        value: Text to convert.
        to_bool: Whether to return True and False instead of 1 and 0. Default: False.

    Raises:
        ConfigError: If `value` is none of these words.
    """
    flag = env.parse_bool(value, "value")
    return flag if to_bool else int(flag)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a boolean, or `default` if it is not set.

    Raises:
        ConfigError: If the variable is set to a text that `str_to_bool` does not accept.
    """
    text = env.get(key)
    return bool(default) if text is None else bool(str_to_bool(text))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of an environment variable, or `default` if it is not set."""
    text = env.get(key)
    return str(default) if text is None else text


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the value of the first environment variable that is set to 0 or more, or `default`.

    Args:
        env_keys: Names of environment variables in order of priority.
        default: Value to return if no variable qualifies.

    Raises:
        ConfigError: If a variable that is read is set to a text that is not a whole number.
    """
    values = (env.get_int(key) for key in env_keys)
    return next((value for value in values if value is not None and value >= 0), default)


def patch_environment(**kwargs: object) -> AbstractContextManager[None]:
    """Return a context manager that sets environment variables, and restores their previous values at its end.

    Args:
        kwargs: Values by name. Names are converted to upper case, values to text.
    """
    return env.patch_variables({key.upper(): str(value) for key, value in kwargs.items()})


def clear_environment() -> AbstractContextManager[None]:
    """Return a context manager that removes all environment variables, and restores them at its end."""
    return env.clear_variables()


def purge_accelerate_environment(func_or_cls: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function or test class to undo changes to `ACCELERATE_*` and `HEADWAY_*` variables after each call.

    Args:
        func_or_cls: Function, or class. In the class and its subclasses, methods whose names begin with "test" are
            decorated.
    """
    if not isinstance(func_or_cls, type):
        return _decorate_function(func_or_cls)
    _restore_after_tests(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(lambda cls, **_: _restore_after_tests(cls))  # type: ignore[assignment]
    return func_or_cls


def _decorate_function(function: Callable[..., Any]) -> Callable[..., Any]:
    decorated = _restore_variables()(function)
    decorated.restores_variables = True  # type: ignore[attr-defined]
    return decorated


def _restore_after_tests(test_class: type) -> None:
    """Decorate the test methods of a class, so that each one restores the environment variables at its end."""
    for name in dir(test_class):
        method = getattr(test_class, name) if name.startswith("test") else None
        if callable(method) and not hasattr(method, "restores_variables"):
            setattr(test_class, name, _decorate_function(method))


@contextmanager
def _restore_variables() -> Iterator[None]:
    """Return a context manager that restores all environment variables at its end."""
    before = _read_variables()
    try:
        yield
    finally:
        env.apply_changes({name: before.get(name) for name in {*before, *_read_variables()}})


def _read_variables() -> dict[str, str]:
    prefixes = ("ACCELERATE_", env.PREFIX)
    return {name: value for name, value in env.copy_variables().items() if name.startswith(prefixes)}


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the given module names whose modules have already been imported."""
    return [name for name in library_names if name in sys.modules]


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit, such as "1.5 KB" for 1536. 1 KB is 1024 bytes."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return the number of bytes in a size such as "5GB" or "10MiB" (see `headway.common.text.parse_bytes`).

    A lowercase b means bits: "5Gb" is an eighth of "5GB".

    Raises:
        ConfigError: If the text is not a size.
    """
    is_in_bits = isinstance(size, str) and size.endswith("b") and size[-2:-1].lower() in "kmg"
    return parse_bytes(size) // (8 if is_in_bits else 1)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a program accepts connections on a TCP port of localhost.

    Args:
        port: Port number. None: 29500.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a function or class, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge `source` into `destination` recursively, in place, and return `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return the attribute at a dotted path, such as `obj.a.b` for "a.b"."""
    return reduce(getattr, attr.split("."), obj)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file that makes `headway launch` use all devices of this machine and the given precision.

    Args:
        mixed_precision: "no" (the default), "bf16", "fp16" or "fp8".
        save_location: Path of the file. None: the default path of `headway config`.

    Returns:
        The path, or False if the file already exists. An existing file is not changed.

    Raises:
        ConfigError: If the precision is unknown.
    """
    path = find_default_file(env.copy_variables()) if save_location is None else Path(save_location)
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision={mixed_precision!r}; allowed: {', '.join(map(repr, PRECISIONS))}")
    if path.exists():
        print(f"{path} already exists and was left alone; edit it with `headway config`, or give another save_location")
        return False
    write_config(LaunchConfig(mixed_precision=precision), path)
    return path


def enable_fsdp_ram_efficient_loading() -> None:
    """Set environment variables so that only one process reads a sharded model's weights in transformers."""
    use = env.get("ACCELERATE_USE_FSDP") or "True"
    env.apply_changes({"ACCELERATE_USE_FSDP": use, "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Set environment variables so that all processes read a model's weights in transformers."""
    env.apply_changes({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return a line "NAME=value" for each environment variable. Each line ends with a newline.

    Some variables are left out with a warning: those with an empty value, and those whose name or value contains a
    space, a newline, `;`, `<` or `>`.
    """
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
    """Return the DeepSpeed plugin of an `AcceleratorState`.

    Raises:
        ConfigError: If the run does not use DeepSpeed.
    """
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(f"there is no active DeepSpeedPlugin: the run is {state.distributed_type}, not DEEPSPEED")
    return state.deepspeed_plugin
