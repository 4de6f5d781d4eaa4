"""`headway config`: create, show, update or import the config file from which `headway launch` reads its settings.

The interactive command asks only for settings that cannot be detected on this machine. Each question has a default,
and each answer is checked.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headway.cli.options import (
    JSON,
    GroupedCommand,
    LocalPath,
    format_examples,
    make_option,
    read_command_line_layer,
    replace_dashes,
)
from headway.cli.prompts import choose_prompt
from headway.common import env
from headway.compat.accelerate.launching.config_file import explain_file_key, find_alternative
from headway.compat.accelerate.launching.layout_words import explain_layout_key
from headway.core.config import mesh
from headway.core.config.files import (
    KEYS,
    find_default_file,
    format_config,
    load_mapping,
    read_config,
    read_file_layer,
    read_settings,
    write_config,
)
from headway.core.config.launch import EARLIER_NAMES, PRECISIONS, SETTINGS, LaunchConfig, LaunchSetting
from headway.core.config.load import merge_layers, read_environment_layer
from headway.core.config.values import parse_text
from headway.errors import ConfigError, StateError

ALL_DEVICES, SOME_DEVICES, NO_DEVICES = "all of them", "some of them", "none: the CPU"
LAYOUT_DESCRIPTIONS = {
    "ddp": "ddp: a replica of the model on every process; fastest if the model fits",
    "fsdp": "fsdp: weights, gradients and optimizer state sharded across all processes",
    "hsdp": "hsdp: sharded within groups of processes, with a replica in each group; for several machines",
    "tp": "tp: every matrix split across all processes; for large layers, few processes and fast links",
    "fsdp+cp": "fsdp+cp: sequences sharded within groups, parameters sharded across all; for long sequences",
    "fsdp+tp": "fsdp+tp: matrices split within groups, parameters sharded across the groups; for the largest models",
}
"""Layouts that the interactive command offers, each with a description of how the model is distributed."""
_GROUP_LAYOUT_FORMATS = {"hsdp": "hsdp={}", "fsdp+tp": "fsdp+tp={}", "fsdp+cp": "fsdp+cp={}"}
"""Strategy by layout, with {} for the number of processes in a group, for layouts with groups of processes."""
_SPLIT_OBJECTS = {"fsdp+tp": "matrix", "fsdp+cp": "sequence"}
"""Name of the object that each group of processes splits, by layout, for the question about the group's size."""


@dataclass(frozen=True)
class ConfigQuestion:
    """Question that `headway config` asks the user.

    Attributes:
        name: Setting that the answer determines. Three names are not settings: "devices" asks which accelerators are
            used, and "layout" and "group" together determine the strategy.
        text: Text of the question.
        default: Suggested answer.
        choices: Allowed answers. Empty if any text is allowed.
        layout_format: Format string for a layout, such as "hsdp={}", with {} for the answer. If empty, the answer is
            the value of the setting.
        num_processes: Number of processes that the layout in `layout_format` must fit. None: any number.
    """

    name: str
    text: str
    default: str
    choices: tuple[str, ...] = ()
    layout_format: str = ""
    num_processes: int | None = None

    def find_problem(self, answer: str) -> str | None:
        """Return a description of what is wrong with an answer, or None if the answer is valid."""
        if self.choices:
            return None if answer in self.choices else f"one of {', '.join(self.choices)}"
        try:
            if self.layout_format:
                _check_layout(self.layout_format.format(answer.strip()), self.num_processes)
            else:
                parse_text(SETTINGS[self.name], answer, "your answer")
        except ConfigError as error:
            return str(error)
        return None


def _check_layout(layout_text: str, num_processes: int | None) -> None:
    """Raise `ConfigError` if a text is not a layout, or does not fit the number of processes."""
    layout = mesh.parse_layout(layout_text)
    if num_processes is not None:
        layout.resolve(num_processes)


Ask = Callable[[ConfigQuestion], str]


def ask_questions(
    ask: Ask, accelerator: str | None, num_devices: int, device_ids: tuple[str, ...] = ()
) -> LaunchConfig:
    """Ask the user for the settings that this machine does not determine, and return the launch configuration.

    Args:
        ask: Function that asks one question and returns a valid answer.
        accelerator: Type of this machine's accelerators, such as "cuda". None if there are none.
        num_devices: Number of visible accelerators.
        device_ids: IDs of the visible accelerators, such as "0", from which the user can choose. The default () is for
            machines without accelerators.
    """
    answers: dict[str, str] = {}

    def ask_setting(name: str, text: str, default: str, choices: tuple[str, ...] = ()) -> str:
        answers[name] = ask(ConfigQuestion(name, text, default, choices))
        return answers[name]

    num_machines = int(ask_setting("num_machines", "How many machines take part in a run?", "1"))
    if num_machines > 1:
        ask_setting("machine_rank", "Which of them is this one, counted from 0?", "0")
        ask_setting("main_process_ip", "At which address do the others reach machine 0?", "10.0.0.1")
        ask_setting("main_process_port", "On which free port of machine 0 do they meet?", "29400")
    devices = NO_DEVICES
    if accelerator is not None:
        devices = ask_setting(
            "devices",
            f"This machine has {num_devices} x {accelerator}. Which are used?",
            ALL_DEVICES,
            (ALL_DEVICES, SOME_DEVICES, NO_DEVICES),
        )
    if devices == SOME_DEVICES:
        ask_setting("gpu_ids", f"Which, separated by commas? There are {', '.join(device_ids)}.", device_ids[0])
    if devices == NO_DEVICES:
        per_run = "How many processes are started on the CPU, over all machines?"
        ask_setting("num_processes", per_run, str(num_machines))
    if devices == NO_DEVICES:
        num_processes = int(answers["num_processes"])
    elif devices == SOME_DEVICES:
        num_processes = num_machines * len(answers["gpu_ids"].split(","))
    else:
        num_processes = num_machines * num_devices
    if num_processes > 1:
        _ask_layout(ask, answers, num_processes, num_processes // num_machines)
    ask_setting("mixed_precision", "Which precision has the forward pass?", "no", PRECISIONS)
    ask_setting("gradient_accumulation_steps", "How many micro-batches make an update?", "1")
    return _make_launch_config(answers, has_accelerator=accelerator is not None)


def _ask_layout(ask: Ask, answers: dict[str, str], num_processes: int, per_machine: int) -> None:
    """Ask for the model's layout and, if the layout has groups of processes, for the size of a group.

    Args:
        ask: Function that asks one question and returns a valid answer.
        answers: Answers so far, by setting. The strategy is added unless it is "ddp", the default.
        num_processes: Number of processes of the run.
        per_machine: Number of processes on each machine.
    """
    description = ask(
        ConfigQuestion(
            "layout", "How should the model be split?", LAYOUT_DESCRIPTIONS["ddp"], tuple(LAYOUT_DESCRIPTIONS.values())
        )
    )
    strategy = description.partition(":")[0]
    if strategy in _GROUP_LAYOUT_FORMATS:
        layout_format = _GROUP_LAYOUT_FORMATS[strategy]
        divisors = [size for size in range(2, num_processes) if num_processes % size == 0]
        if strategy in _SPLIT_OBJECTS:
            question = f"How many processes share a {_SPLIT_OBJECTS[strategy]}?"
            default_size = min(divisors, default=2)
        else:
            question = "Across how many processes is each replica sharded?"
            # Shards within one machine exchange parameters over its fast links.
            default_size = max((size for size in divisors if size <= per_machine), default=2)
        group_size = ask(
            ConfigQuestion(
                "group", question, str(default_size), layout_format=layout_format, num_processes=num_processes
            )
        )
        strategy = layout_format.format(group_size.strip())
    if strategy != "ddp":
        answers["strategy"] = strategy


def _make_launch_config(answers: Mapping[str, str], has_accelerator: bool) -> LaunchConfig:
    """Return the answers as a launch configuration.

    A single machine and a single micro-batch per update stay unset, so that a script can set other numbers.

    Args:
        answers: Answers by the names of their questions.
        has_accelerator: Whether this machine has an accelerator. If the user chose none, `cpu` is set.
    """
    settings: dict[str, Any] = {
        name: parse_text(SETTINGS[name], answer, "your answer")
        for name, answer in answers.items()
        if name in SETTINGS and (name, answer) not in (("num_machines", "1"), ("gradient_accumulation_steps", "1"))
    }
    if has_accelerator and answers.get("devices") == NO_DEVICES:
        settings["cpu"] = True
    return LaunchConfig(**settings)


def _get_config_path(config_file: str | None) -> Path:
    return Path(config_file) if config_file is not None else find_default_file(env.copy_variables())


def _ask_and_write(config_file: str | None) -> None:
    """Ask the user for the settings, write them to the config file, and print the file's path and content.

    Raises:
        StateError: If standard input or output is not a terminal.
    """
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise StateError(
            "`headway config` asks questions on a terminal; without one, `headway config default` writes a file to edit"
        )
    from headway.launch import machine

    this_machine = machine.inspect_machine(env.copy_variables())
    _write_and_show(
        ask_questions(choose_prompt(), this_machine.accelerator, len(this_machine.device_ids), this_machine.device_ids),
        _get_config_path(config_file),
    )


def _write_and_show(config: LaunchConfig, path: Path) -> None:
    """Write a config file, and print its path and content."""
    write_config(config, path)
    click.echo(f"written to {path}:")
    click.echo(format_config(config), nl=False)


def _write_default(config_file: str | None, mixed_precision: str | None, force: bool) -> None:
    """Write a config file of default settings, and print it.

    Args:
        config_file: Path of the file. None: the default path.
        mixed_precision: Value of the setting. None: not set.
        force: Whether to replace an existing file.

    Raises:
        ConfigError: If the file exists and `force` is False.
    """
    path = _get_config_path(config_file)
    if path.exists() and not force:
        raise ConfigError(
            f"{path} exists already; add --force to write over it, or `headway config update` to bring it up to date"
        )
    _write_and_show(merge_layers([read_command_line_layer({"mixed_precision": mixed_precision})]).config, path)


def _update_config(config_file: str | None) -> None:
    """Rewrite a config file in the current format. Print the keys that no longer exist, which are removed.

    Raises:
        ConfigError: If the file is missing or invalid, or contains another unknown key.
    """
    path = _get_config_path(config_file)
    data = load_mapping(read_config(path), str(path))
    kept_values = {}
    for key, value in data.items():
        is_known = key in KEYS or key in EARLIER_NAMES
        removal_reason = None if is_known else find_alternative(key) or explain_layout_key(key)
        if removal_reason is None:  # an unknown key without a reason is an error later
            kept_values[key] = value
        else:
            click.echo(f"taken out: {key}: {removal_reason}")
    _write_and_show(merge_layers([read_settings(kept_values, str(path), explain_file_key)]).config, path)


def _show_settings(config_file: str | None, as_json: bool) -> None:
    """Print every setting of config files with its value and origin. Environment variables override the file."""
    environment = env.copy_variables()
    resolved = merge_layers(
        [read_environment_layer(environment), read_file_layer(config_file, environment, explain_file_key)]
    )
    names = [setting.name for setting in SETTINGS.values() if setting.is_for_files]
    if as_json:
        entries: dict[str, Any] = {
            name: {"value": resolved.get(name), "origin": resolved.get_origin(name)}
            for name in names
            if resolved.config.is_set(name)
        }
        click.echo(json.dumps(entries, indent=2))
        return
    values = {name: json.dumps(resolved.get(name)) if resolved.config.is_set(name) else "-" for name in names}
    name_width = max(map(len, names))
    value_width = min(30, max(10, *map(len, values.values())))
    for name, value in values.items():
        is_set = resolved.config.is_set(name)
        origin = resolved.get_origin(name) if is_set else _describe_default(SETTINGS[name])
        click.echo(f"{name:<{name_width}}  {value:<{value_width}}  {origin}")


def _describe_default(setting: LaunchSetting) -> str:
    return f"default: {setting.default or ('off' if setting.kind == 'switch' else 'not set')}"


def _import_accelerate_config(accelerate_file: str, config_file: str | None, force: bool) -> None:
    """Translate a config file of Accelerate, print a report on each key, and write the translation.

    Args:
        accelerate_file: Path of the file of Accelerate.
        config_file: Path of the file to write. None: the default path of `headway config`.
        force: Whether to replace an existing file.

    Raises:
        ConfigError: If the file cannot be read or has an unknown key. Also if the output exists and `force` is False.
    """
    from headway.compat.accelerate.launching.config_file import translate_config

    translation = translate_config(load_mapping(read_config(Path(accelerate_file)), accelerate_file), accelerate_file)
    width = max((len(key) for key, _ in translation.lines), default=0)
    for key, description in translation.lines:
        click.echo(f"{key:<{width}}  {description}")
    if translation.num_lost:
        click.echo(f"{translation.num_lost} of {translation.num_keys} keys could not be kept: runs will not use them")
    path = _get_config_path(config_file)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; add --force to write over it, or --config_file to write elsewhere")
    _write_and_show(translation.config, path)


_WHERE = "The file.  [default: default_config.yaml in $HEADWAY_HOME, else in ~/.config/headway]"
_FILE = make_option("--config_file", "PATH", "Options", _WHERE, LocalPath())
_FORCE = make_option("--force", None, "Options", "Replace an existing file.")
_PRECISION = make_option("--mixed_precision", "no|bf16|fp16|fp8", "Options", SETTINGS["mixed_precision"].text)
_ACCELERATE_FILE = click.Argument(["accelerate_file"], metavar="FILE")


def _make_subcommand(name: str, callback: Any, help_: str, *params: click.Parameter) -> click.Command:
    return GroupedCommand(name, callback=callback, params=list(params), help=help_)


_DEFAULT = "Write a config file without asking. It leaves all settings to automatic detection."
_UPDATE = "Update a config file. Settings that no longer exist are removed and listed."
_SHOW = "Print all settings with their origin. Settings that are not set have their default."
_IMPORT = "Translate Accelerate's config file, and print the new name of each key."
_SUBCOMMANDS = [
    _make_subcommand("default", _write_default, _DEFAULT, _FILE, _PRECISION, _FORCE),
    _make_subcommand("update", _update_config, _UPDATE, _FILE),
    _make_subcommand("show", _show_settings, _SHOW, _FILE, JSON),
    _make_subcommand("import", _import_accelerate_config, _IMPORT, _ACCELERATE_FILE, _FILE, _FORCE),
]


class ConfigGroup(click.Group):
    """Command group that starts the interactive questions if no subcommand is given."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example commands at the end of the help page without wrapping their lines."""
        formatter.write_paragraph()
        formatter.write(f"{self.epilog}\n")


def _run_config(config_file: str | None) -> None:
    """Ask for the settings and write the config file, unless a subcommand follows, which then runs.

    Raises:
        ConfigError: If `--config_file` precedes a subcommand.
    """
    subcommand = click.get_current_context().invoked_subcommand
    if subcommand is None:
        _ask_and_write(config_file)
    elif config_file is not None:
        raise ConfigError(f"--config_file must follow the subcommand: headway config {subcommand} --config_file PATH")


command = ConfigGroup(
    "config",
    callback=_run_config,
    invoke_without_command=True,
    params=[_FILE],
    commands={str(subcommand.name): subcommand for subcommand in _SUBCOMMANDS},
    help="Ask for the settings that cannot be detected, write the config file, and print its path. Subcommands ask no questions.",
    epilog=format_examples(
        "headway config                              ask and write",
        "headway config default --mixed_precision bf16",
        "headway config show                         every setting with its origin",
        "headway config import accelerate.yaml       translate Accelerate's file",
    ),
    context_settings={"token_normalize_func": replace_dashes, "help_option_names": ["-h", "--help"]},
)
