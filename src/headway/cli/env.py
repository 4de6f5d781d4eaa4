"""`headway env`: print versions, hardware and configuration, for bug reports."""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import click

from headway.cli.options import JSON, GroupedCommand
from headway.common import env
from headway.common.text import format_bytes
from headway.compat.accelerate.launching.config_file import explain_file_key
from headway.core.config.files import find_default_file, read_file_layer
from headway.core.config.load import merge_layers, read_environment_layer
from headway.errors import HeadwayError
from headway.launch import machine
from headway.version import __version__

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "datasets", "torchdata", "accelerate", "deepspeed")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLURM_JOB_ID")


def describe_environment() -> dict[str, str]:
    """Return versions, hardware and configuration of this installation as text by name.

    This includes environment variables that affect a run, but not the values of secrets.
    """
    environment = env.copy_variables()
    this_machine = machine.inspect_machine(environment)
    entries = {
        "headway": f"{__version__} ({Path(__file__).resolve().parents[1]})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        version = _find_version(package)
        if version or package == "torch":
            entries[package] = version or "not installed"
    entries["accelerators"] = _describe_accelerators(this_machine)
    entries["CPU cores"] = str(this_machine.num_cores)
    entries["memory"] = _describe_memory()
    file = find_default_file(environment)
    entries["config file"] = f"{file}" + ("" if file.exists() else " (none there)")
    entries["layout"] = _describe_layout(environment)
    for name in sorted(environment):
        if name in (env.SECRET, env.CONTROL):
            entries[name] = "set, and not shown"
        elif name in _VARIABLES or (name.startswith(env.PREFIX) and name != env.PAYLOAD):
            entries[name] = environment[name]
    return entries


def _describe_layout(environment: dict[str, str]) -> str:
    """Return the strategy that a launch would use on this machine, followed by the origin of this setting.

    If the settings are invalid, return "unknown" and the error message.
    """
    try:
        resolved = merge_layers(
            [read_environment_layer(environment), read_file_layer(None, environment, explain_file_key)]
        )
    except HeadwayError as error:  # an error here must not hide the other entries
        return f"unknown: {error}"
    return f"{resolved.get('strategy', 'ddp')} ({resolved.get_origin('strategy')})"


def _find_version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe_accelerators(this_machine: machine.Machine) -> str:
    """Return the number, the kind and the IDs of the machine's accelerators as text."""
    if this_machine.accelerator is None:
        return "none that this torch can use"
    return f"{len(this_machine.device_ids)} x {this_machine.accelerator} ({', '.join(this_machine.device_ids)})"


def _describe_memory() -> str:
    """Return the free and the total host memory as text."""
    import psutil

    memory = psutil.virtual_memory()
    return f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"


def _run_env(as_json: bool) -> None:
    """Print the environment as a table or as JSON."""
    entries = describe_environment()
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    width = max(len(name) for name in entries)
    for name, value in entries.items():
        click.echo(f"{name:<{width}}  {value}")


command = GroupedCommand(
    "env",
    callback=_run_env,
    params=[JSON],
    help="Print versions, hardware and configuration. Only Headway's own code is imported.",
)
