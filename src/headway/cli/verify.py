"""`headway verify`: run a script's first updates several times, and compare the results of these runs."""

import json
import os
import shlex
import stat
import sys
import warnings
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click

from headway.cli.launch import merge_settings
from headway.cli.options import (
    CONFIG_FILE,
    JSON,
    GroupedCommand,
    GroupedOption,
    format_examples,
    make_option,
    make_script_arguments,
    make_setting_options,
    read_command_line_layer,
)
from headway.common import env
from headway.core.config.launch import SETTINGS
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.launch.machine import Machine
    from headway.launch.order import Program

PROOFS = ("repeat", "processes", "layout", "samples", "resume", "out_of_memory", "learning", "leaks", "memory", "data")
"""Names of all proofs (checks of a script) for `--only` and `--skip`, in the order of the printed table."""

_ABOUT = """Check a training script before a long run: run its first updates several times, and compare the results.

The runs use a scratch folder. They start one process and several, are killed and resumed, or run out of memory. Each line of the
table is one proof: PASS, FAIL with the place and the likely cause, or NOT CHECKED with the reason. The exit code is 0 if no proof
failed and at least one passed.
"""

_EPILOG = format_examples(
    "headway verify train.py --lr 3e-4              compare two processes with one",
    "headway verify -n 4 --strategy fsdp train.py   also compare the layout with one process",
    "headway verify --as accelerate train.py        a script written for Accelerate",
    "headway verify --only resume --resume_args '--resume runs/last' train.py",
)


_REFUSED_SETTINGS = {
    "no_python": "verify reads what a Python script trains",
    "max_restarts": "verify restarts no run, because a failure is a result",
    "log_dir": "verify prints the last lines of a run that fails",
    "tee": "verify prints the last lines of a run that fails",
    "metrics_port": "verify runs the script several times, so that no port belongs to one run",
}
"""Flags of `headway launch` that verify refuses, each with the reason."""


def _run_verify(**flag_values: Any) -> NoReturn:
    """Check the options, then become the main process of verify. With `--json`, errors are also printed as JSON."""
    try:
        options = make_options(**flag_values)
    except HeadwayError as error:
        if flag_values["as_json"]:
            from headway.verify.table import format_error_json

            click.echo(format_error_json(str(error)))
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    _start_main_process(options)


def _start_main_process(options: dict[str, Any]) -> NoReturn:
    """Replace this process with the main process of verify, which then gets all signals, such as that of Ctrl-C."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "headway.verify", json.dumps(options)])


def make_options(
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None = None,
    only: str | None = None,
    skip: str | None = None,
    updates: int = 6,
    time_limit: float = 60.0,
    device: str | None = None,
    resume_args: str | None = None,
    as_json: bool = False,
    **flag_values: Any,
) -> dict[str, Any]:
    """Return the options of `python -m headway.verify` as a dict that can be written as JSON.

    A proof is a check of the script, such as "resume".

    Args:
        script: Path of a script, or name of a module.
        script_args: Arguments of the script.
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        only: Names of proofs to run, separated by commas. Default: all.
        skip: Names of proofs to leave out, separated by commas. Default: none.
        updates: Number of updates in each run. Default: 6.
        time_limit: Number of seconds that each run may go without progress. Default: 60.
        device: Name of the device on which the full run will train. The memory of the full run on this device is
            forecast. Default: no such forecast.
        resume_args: Arguments to add to `script_args` when the script is started again after a kill, in one text that
            is split as in a shell. Default: none.
        as_json: Whether to print JSON. Default: False.
        flag_values: Values from the command line by setting name; None if a flag was not given.

    Raises:
        ConfigError: If an argument is invalid or not supported by verify, settings contradict each other, or no proof
            is left to run. Also if the script does not exist or has a syntax error.
    """
    # Imported here so that `--help` does not wait for these imports.
    from headway.launch import machine
    from headway.launch.order import Program
    from headway.launch.run import check_program

    typed_settings = {name: value.value for name, value in read_command_line_layer(flag_values).items()}
    is_module = bool(typed_settings.get("module"))
    # The runs start in a scratch folder, where a relative path would not find the script.
    script = script if is_module else os.path.abspath(script)
    program = Program(script, script_args, "module" if is_module else "script")
    check_program(program, can_be_other=False)
    if not is_module:
        _check_syntax(script)
    _check_settings(typed_settings, device)
    this_machine = machine.inspect_machine(env.copy_variables())
    num_processes, is_on_cpu, notes = _choose_processes(typed_settings, this_machine)
    layout_settings = [name for name in typed_settings if SETTINGS[name].group == "Layout"]
    proofs = _choose_proofs(only, skip, has_layout=bool(layout_settings))
    if is_on_cpu:
        flag_values["cpu"] = True
    # One process has plain replicas, and so have the several processes that are compared with it first.
    plain_values = {name: value for name, value in flag_values.items() if name not in layout_settings}
    commands = {
        "one": _make_command(program, 1, plain_values, config_file, this_machine),
        "several": _make_command(program, num_processes, plain_values, config_file, this_machine),
    }
    if layout_settings:
        commands["layout"] = _make_command(program, num_processes, flag_values, config_file, this_machine)
    runs_on_cpu = is_on_cpu or not this_machine.device_ids
    forecast_devices = {"forecast": "cpu" if runs_on_cpu else "this"}
    if device:
        forecast_devices["full"] = device
    for name, forecast_device in forecast_devices.items():
        kind_flag = "--module" if is_module else "--script"
        arguments = ("estimate", kind_flag, script, "--device", forecast_device, "--json", "--", *script_args)
        estimate = Program("headway", arguments, "module")
        commands[name] = _make_command(estimate, 1, plain_values, config_file, this_machine)
    return {
        "commands": commands,
        "is_forked": runs_on_cpu,
        "num_processes": num_processes,
        "layout_name": str(typed_settings.get("strategy", "")) or ("the layout" if layout_settings else ""),
        "num_updates": updates,
        "time_limit": time_limit,
        "resume_args": _split_arguments(resume_args or ""),
        "proofs": proofs,
        "notes": notes,
        "is_json": as_json,
    }


def _make_command(
    program: "Program",
    num_processes: int,
    flag_values: Mapping[str, Any],
    config_file: str | None,
    this_machine: "Machine",
) -> dict[str, Any]:
    """Return the command line, environment variables and program of a run, as a dict that can be written as JSON.

    Args:
        program: Program to start.
        num_processes: Number of processes.
        flag_values: Values from the command line by setting name; None if a flag was not given.
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        this_machine: Description of this machine.

    Raises:
        ConfigError: If settings are invalid or contradict each other.
    """
    from headway.launch.plan import make_plan

    environment = env.copy_variables()
    settings = {**flag_values, "num_processes": str(num_processes)}
    resolved = merge_settings(settings, config_file, False, environment, {})
    launch_plan = make_plan(resolved, program, this_machine, environment, None, ())
    return {
        "argv": list(launch_plan.argv),
        "variables": dict(launch_plan.additions),
        "program": [program.kind, program.target, *program.args],
        "num_processes": num_processes,
    }


def _check_settings(typed_settings: Mapping[str, Any], device: str | None) -> None:
    """Raise an error for a setting that verify does not support, or for a device that forecasts do not know.

    Args:
        typed_settings: Settings from the command line, by name.
        device: Name of the device on which the full run will train, or None.

    Raises:
        ConfigError: If a setting is not supported, or the device is unknown.
    """
    if device and device.lower() != "this":
        from headway.forecasting.device import devices

        devices.find_device(device)  # report an unknown name before anything runs
    for name, reason in _REFUSED_SETTINGS.items():
        if typed_settings.get(name):
            raise ConfigError(f"{reason}; leave {SETTINGS[name].flag} out")
    if typed_settings.get("num_machines", 1) > 1:
        raise ConfigError("verify runs on one machine; leave --num_machines out")


def _split_arguments(text: str) -> list[str]:
    """Split a text into arguments as a shell does.

    Raises:
        ConfigError: If a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--resume_args {text!r} cannot be split as in a shell: {error}; close the quotation"
        ) from None


def _choose_processes(typed_settings: dict[str, Any], this_machine: Any) -> tuple[int, bool, list[str]]:
    """Choose the number of processes to compare with one process, and whether to use the CPU.

    Args:
        typed_settings: Settings given on the command line, by name.
        this_machine: Description of this machine.

    Returns:
        Number of processes, whether all runs use the CPU, and notes for the user about this choice.

    Raises:
        ConfigError: If the command line asks for fewer than two processes.
    """
    num_devices = len(this_machine.device_ids)
    is_on_cpu = bool(typed_settings.get("cpu"))
    num_processes = typed_settings.get("num_processes") or (num_devices if num_devices > 1 else 2)
    if num_processes < 2:
        raise ConfigError("verify compares one process with several: give -n 2 or more, or leave -n out")
    notes = []
    if not is_on_cpu and num_devices < num_processes:
        is_on_cpu = True
        if num_devices:
            notes.append(
                f"{num_processes} processes need {num_processes} devices, and this machine has {num_devices}: all runs use the CPU"
            )
    return num_processes, is_on_cpu, notes


def _check_syntax(script: str) -> None:
    """Raise a `ConfigError` if the script has a syntax error, which would else be found only after torch was imported.

    A folder or an archive is not checked, because its `__main__.py` is rarely the file with the error.

    Args:
        script: Path of the script.
    """
    if not stat.S_ISREG(os.stat(script).st_mode) or zipfile.is_zipfile(script):
        return
    with open(script, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the runs of the script print them
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        name = os.path.relpath(script)
        where = f"{name}:{error.lineno}" if error.lineno else name
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise ConfigError(f"the script has a syntax error at {where}: {error.msg}{line}") from None
    except ValueError as error:  # null bytes, before Python 3.12
        raise ConfigError(f"the script {os.path.relpath(script)} is not Python source: {error}") from None


def _choose_proofs(only: str | None, skip: str | None, *, has_layout: bool) -> list[str]:
    """Return the names of the proofs to run, in the order of the table.

    Args:
        only: Names of proofs to run, separated by commas. None: all.
        skip: Names of proofs to leave out, separated by commas. None: none.
        has_layout: Whether the command line selects a layout.

    Raises:
        ConfigError: If a name is unknown, or if no proof is left that can be checked.
    """
    selected = _parse_proof_names(only, "--only") or list(PROOFS)
    skipped = _parse_proof_names(skip, "--skip")
    proofs = [word for word in PROOFS if word in selected and word not in skipped]
    if not proofs:
        flags = " ".join(f"{flag} {words}" for flag, words in (("--only", only), ("--skip", skip)) if words)
        raise ConfigError(f"{flags} leaves no proof to run; available proofs: {', '.join(PROOFS)}")
    if proofs == ["layout"] and not has_layout:
        raise ConfigError("the proof 'layout' needs a layout to compare with: add one, such as --strategy fsdp")
    return proofs


def _parse_proof_names(text: str | None, flag: str) -> list[str]:
    """Return the proofs that a comma-separated text names. Dashes count as underscores.

    Args:
        text: Value of the flag. None: an empty list.
        flag: Flag, for the error message.

    Raises:
        ConfigError: If a name is unknown.
    """
    from headway.core.config.values import suggest_word

    words = [word.strip().replace("-", "_") for word in (text or "").split(",") if word.strip()]
    for word in words:
        if word not in PROOFS:
            hint = suggest_word(word, list(PROOFS)) or f"; there are {', '.join(PROOFS)}"
            raise ConfigError(f"{flag} {word!r} is not a proof{hint}")
    return words


def _make_launch_options() -> list[click.Parameter]:
    """Return the options of `headway launch`. The help hides those that `headway verify` refuses.

    It also hides those for several machines.
    """
    options = make_setting_options()
    for option in options:
        assert isinstance(option, GroupedOption)
        setting = SETTINGS[str(option.name)]
        option.hidden = setting.group == "Several machines" or setting.name in _REFUSED_SETTINGS
        if setting.name == "num_processes":
            option.help = "Processes to compare with one.  [default: one per visible accelerator, at least 2]"
        if setting.name == "run_as":
            option.is_rare = False
    return options


command = GroupedCommand(
    "verify",
    callback=_run_verify,
    params=[
        make_option("--only", "WORDS", "Proofs", f"Proofs to run, separated by commas: {', '.join(PROOFS)}."),
        make_option("--skip", "WORDS", "Proofs", "Proofs to leave out, separated by commas."),
        make_option(
            "--updates", "N", "Proofs", "Updates of each run.  [default: 6]", click.IntRange(3, 100), default=6
        ),
        make_option(
            "--time_limit",
            "SECONDS",
            "Proofs",
            "Seconds that each run may go without progress.  [default: 60]",
            click.FloatRange(1),
            default=60.0,
        ),
        make_option(
            "--device",
            "NAME",
            "Proofs",
            "Also forecast the memory of the full run on this GPU: h100, rtx-4090 ..., as for headway estimate.",
        ),
        make_option(
            "--resume_args",
            "ARGS",
            "Proofs",
            "Arguments to add to those of SCRIPT when it is started again, such as '--resume_from_checkpoint latest'.",
        ),
        JSON,
        *_make_launch_options(),
        CONFIG_FILE,
        *make_script_arguments(),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},
)
