"""Accelerate's command-line tools as Python functions and classes, which other libraries call.

The functions run Headway's counterparts of these tools.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.common import atomic, env
from headway.compat.accelerate.launching.config_file import translate_config
from headway.core.config import files
from headway.errors import ConfigError

_COMMANDS = {
    "config": ("config",),
    "env": ("env",),
    "estimate-memory": ("estimate",),
    "launch": ("launch", "--as", "accelerate"),
    "merge-weights": ("merge",),
    "test": ("test",),
}
"""Arguments of the `headway` command that replace each command of `accelerate`."""

default_config_file = default_json_config_file = default_yaml_config_file = str(
    files.find_default_file(env.copy_variables())
)


class LoadedConfig:
    """Contents of a config file of Headway or Accelerate, with the file's keys as attributes.

    Args:
        values: Values by key.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the config file and their values as a dict."""
        return dict(self.__dict__)


class ClusterConfig(LoadedConfig):
    """Launch configuration with the keys of Accelerate's config files.

    Keys that are not given have Accelerate's defaults, if it has any. Members of enumerations become their values.

    Args:
        leading_values: Values of compute_environment, distributed_type, mixed_precision, use_cpu and debug, in this
            order.
        values: Values of other keys, as keyword arguments.
    """

    def __init__(self, *leading_values: Any, **values: Any) -> None:
        leading_keys = ("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug")
        config = {**_DEFAULTS, **dict(zip(leading_keys, leading_values)), **values}
        super().__init__({name: getattr(value, "value", value) for name, value in config.items()})


_DEFAULTS = {
    "num_processes": -1, "machine_rank": 0, "num_machines": 1, "rdzv_backend": "static", "same_network": False,
    "main_training_function": "main", "enable_cpu_affinity": False, "downcast_bf16": False, "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}  # fmt: skip
_FSDP1_ONLY_KEYS = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)
_RESHARD_BY_STRATEGY = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the section `fsdp_config` of a config file to FSDP2's keys, in place, and return the config.

    A config without this section, or with the keys of FSDP2, is not changed. Only Accelerate needs this conversion.
    `headway config import` reads the keys of FSDP1 and FSDP2.
    """
    section = config.get("fsdp_config") or {}
    if section and section.get("fsdp_version", 1) != 2:
        converted = {}
        for name, value in section.items():
            if name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
                converted["fsdp_reshard_after_forward"] = _RESHARD_BY_STRATEGY.get(value, value)
            elif name not in _FSDP1_ONLY_KEYS:
                converted[name] = value
        config["fsdp_config"] = {**converted, "fsdp_version": 2}
    return config


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the argument parser of `accelerate to-fsdp2`.

    Args:
        subparsers: Subparsers to add the command to. None: return a separate parser.
    """
    description = "Rewrite a config file by the keys of FSDP version 2"
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accelerate to-fsdp2", description=description)
        if subparsers is None
        else subparsers.add_parser("to-fsdp2", description=description)
    )
    parser.add_argument("--config_file", required=True, help="the file to rewrite")
    parser.add_argument("--overwrite", action="store_true", help="write it over, or over the file of --output_file")
    parser.add_argument("--output_file", help="where the rewritten file goes")
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Rewrite a config file with FSDP2's keys, as `accelerate to-fsdp2` does.

    Raises:
        ConfigError: If the file does not exist or is empty. Also if the output would replace a file and --overwrite is
            not given.
    """
    output = Path(args.output_file or args.config_file)
    if not args.overwrite and (args.output_file is None or output.exists()):
        raise ConfigError(f"{output} would be written over; name another --output_file, or add --overwrite")
    config = files.load_mapping(files.read_config(Path(args.config_file)), args.config_file)
    atomic.write_text(output, yaml.safe_dump(convert_config_to_fsdp2(config)))


def load_config_from_file(config_file: str | None) -> LoadedConfig:
    """Return the contents of a config file of Headway or Accelerate.

    Args:
        config_file: Path of the file. None: the default path of `headway config`.

    Raises:
        ConfigError: If the file does not exist or does not contain a mapping.
    """
    path = Path(config_file or default_config_file)
    if not path.is_file():
        raise ConfigError(f"no config file at {path}; `headway config` writes one")
    return LoadedConfig(files.load_mapping(files.read_config(path), str(path)))


class LaunchParser(argparse.ArgumentParser):
    """Argument parser that accepts any arguments, because `headway launch` parses them later and reports errors."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return a namespace whose attribute `line` lists all arguments, and an empty list of unknown arguments."""
        parsed = namespace if namespace is not None else argparse.Namespace()
        parsed.line = list(sys.argv[1:] if args is None else args)
        return parsed, []


def launch_command_parser(subparsers: Any = None) -> LaunchParser:
    """Return a parser for the arguments of `accelerate launch`. `launch_command` accepts the parser's result.

    Args:
        subparsers: Ignored. The parser is always a separate one.
    """
    return LaunchParser("headway launch", add_help=False)


def launch_command(args: argparse.Namespace) -> None:
    """Run `headway launch --as accelerate` and wait until it ends. If it fails, exit with its exit code.

    Args:
        args: Arguments, parsed by the parser that `launch_command_parser` returned.
    """
    code = _run("launch", args.line)
    if code:
        sys.exit(code)


def _run(command: str, arguments: Sequence[str]) -> int:
    return subprocess.call([sys.executable, "-m", "headway", *_COMMANDS[command], *arguments])


def translate_config_file(config_file: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Translate a config file of Accelerate, and return the path of the translation.

    Args:
        config_file: Path of the config file, which can also be one of Headway. That file is not translated.
        folder: Directory for the translated file.

    Returns:
        Path of the file to use, and environment variables for the launched processes.

    Raises:
        ConfigError: If the file cannot be read, or has a key that neither Accelerate nor Headway knows.
    """
    values = files.load_mapping(files.read_config(Path(config_file)), config_file)
    if values.keys() <= set(files.KEYS):
        return config_file, {}
    if values.get("distributed_type") == "NO":
        values["num_processes"] = 1  # with this type, Accelerate starts one process whatever the number is
    translation = translate_config(values, config_file)
    for key, text in translation.lines:
        if text.startswith("NOT KEPT"):
            print(f"headway: {config_file}: {key}: {text}", file=sys.stderr)
    translated_path = folder / f"{Path(config_file).stem}_translated.yaml"
    files.write_config(translation.config, translated_path, original=config_file)
    # transformers' Trainer writes full weights at the end only if this variable requests them.
    state_dict_type = (values.get("fsdp_config") or {}).get("fsdp_state_dict_type")
    return str(translated_path), {"FSDP_STATE_DICT_TYPE": str(state_dict_type)} if state_dict_type else {}


def main() -> int:
    """Run Headway's counterpart of `accelerate COMMAND`, and return the exit code."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "to-fsdp2":
        try:
            to_fsdp2_command(to_fsdp2_command_parser().parse_args(arguments))
        except ConfigError as error:
            print(f"headway: error: {error}", file=sys.stderr)
            return 2
        return 0
    if command not in _COMMANDS:
        commands = ", ".join([*_COMMANDS, "to-fsdp2"])
        print(f"accelerate (served by Headway): no command {command!r}; the commands are {commands}", file=sys.stderr)
        return 2
    return _run(command, arguments)


def launch_main() -> int:
    """Run Headway's counterpart of `python -m accelerate.commands.launch`, and return the exit code."""
    return _run("launch", sys.argv[1:])
