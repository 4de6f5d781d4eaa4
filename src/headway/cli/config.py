"""`headway config`: write, show, update or import the settings that a launch starts from."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from headway.cli.options import JSON, GroupedCommand, command_line_layer, examples, option, underscored
from headway.common import env, optional
from headway.compat.accelerate.launching.launch_flags import advice, explain_file_key
from headway.compat.accelerate.launching.layout_words import explain_key
from headway.config.files import KEYS, default_file, dump, file_layer, load_mapping, read, settings_in, write
from headway.config.launch import SETTINGS, LaunchConfig, LaunchSetting
from headway.config.load import environment_layer, resolve
from headway.errors import ConfigError, StateError


def _path(config_file: str | None) -> Path:
    return Path(config_file) if config_file is not None else default_file(env.snapshot())


def _interactive(config_file: str | None) -> None:
    """Ask, write, and say where."""
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise StateError(
            "`headway config` asks questions and needs a terminal; "
            "without one, `headway config default` writes a file that you can edit"
        )
    from headway.config.questions import ConfigQuestion, interview
    from headway.launch.machine import machine

    questionary = optional.require("questionary", "`headway config` asks its questions with", "headway[config]")

    def ask(question: ConfigQuestion) -> str:
        if question.choices:
            answer = questionary.select(question.text, choices=list(question.choices), default=question.default).ask()
        else:
            check = lambda text: question.problem(text) or True  # noqa: E731  (questionary wants a callable)
            answer = questionary.text(question.text, default=question.default, validate=check).ask()
        if answer is None:
            raise click.Abort
        return str(answer)

    here = machine.look(env.snapshot())
    _write(interview(ask, here.accelerator, len(here.device_ids), here.device_ids), _path(config_file))


def _write(config: LaunchConfig, path: Path) -> None:
    write(config, path)
    click.echo(f"written to {path}:")
    click.echo(dump(config), nl=False)


def _default(config_file: str | None, mixed_precision: str | None, force: bool) -> None:
    path = _path(config_file)
    if path.exists() and not force:
        raise ConfigError(
            f"{path} exists already; add --force to write over it, or `headway config update` to bring it up to date"
        )
    _write(resolve([command_line_layer({"mixed_precision": mixed_precision})]).config, path)


def _update(config_file: str | None) -> None:
    """Rewrite a file in today's form; say what was taken out."""
    path = _path(config_file)
    data = load_mapping(read(path), str(path))
    kept = {}
    for key, value in data.items():
        text = advice(key) or explain_key(key) if key not in KEYS else None
        if text is None:
            kept[key] = value
        else:
            click.echo(f"taken out: {key}: {text}")
    _write(resolve([settings_in(kept, str(path), explain_file_key)]).config, path)


def _show(config_file: str | None, as_json: bool) -> None:
    environment = env.snapshot()
    resolved = resolve([environment_layer(environment), file_layer(config_file, environment, explain_file_key)])
    names = [setting.name for setting in SETTINGS.values() if setting.is_for_files]
    if as_json:
        shown: dict[str, Any] = {
            name: {"value": resolved.get(name), "origin": resolved.origin(name)}
            for name in names
            if resolved.config.is_set(name)
        }
        click.echo(json.dumps(shown, indent=2))
        return
    values = {name: json.dumps(resolved.get(name)) if resolved.config.is_set(name) else "-" for name in names}
    width, wide = max(map(len, names)), min(30, max(10, *map(len, values.values())))
    for name, value in values.items():
        is_set = resolved.config.is_set(name)
        click.echo(
            f"{name:<{width}}  {value:<{wide}}  {resolved.origin(name) if is_set else _undecided(SETTINGS[name])}"
        )


def _undecided(setting: LaunchSetting) -> str:
    return f"default: {setting.default or ('off' if setting.kind == 'switch' else 'not set')}"


def _import(foreign: str, config_file: str | None, force: bool) -> None:
    from headway.compat.accelerate.launching.config_file import translate

    made = translate(load_mapping(read(Path(foreign)), foreign), foreign)
    width = max((len(key) for key, _ in made.lines), default=0)
    for key, text in made.lines:
        click.echo(f"{key:<{width}}  {text}")
    if made.num_lost:
        click.echo(f"{made.num_lost} of {made.num_keys} keys could not be kept: runs will not use them")
    path = _path(config_file)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; add --force to write over it, or --config_file to write elsewhere")
    _write(made.config, path)


_FILE = option(
    "--config_file",
    "PATH",
    "Options",
    "The file.  [default: default_config.yaml in $HEADWAY_HOME, else in ~/.config/headway]",
)
_FORCE = option("--force", None, "Options", "Write over a file that exists.")
_PRECISION = option("--mixed_precision", "no|bf16|fp16|fp8", "Options", SETTINGS["mixed_precision"].text)
_FOREIGN = click.Argument(["foreign"], metavar="FILE")


def _subcommand(name: str, callback: Any, help_: str, *params: click.Parameter) -> click.Command:
    return GroupedCommand(name, callback=callback, params=list(params), help=help_)


_SUBCOMMANDS = [
    _subcommand(
        "default",
        _default,
        "Write a file without asking. It leaves everything to detection.",
        *(_FILE, _PRECISION, _FORCE),
    ),
    _subcommand(
        "update", _update, "Bring a file up to date. Settings that no longer exist are removed and named.", _FILE
    ),
    _subcommand(
        "show", _show, "Print settings with their origin. Those that nobody has set have their default.", _FILE, JSON
    ),
    _subcommand(
        "import",
        _import,
        "Translate Accelerate's config file. What each key became is printed.",
        *(_FOREIGN, _FILE, _FORCE),
    ),
]


class ConfigGroup(click.Group):
    """Asks where no subcommand is named."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        formatter.write_paragraph()
        formatter.write(f"{self.epilog}\n")


def _config(config_file: str | None) -> None:
    subcommand = click.get_current_context().invoked_subcommand
    if subcommand is None:
        _interactive(config_file)
    elif config_file is not None:
        raise ConfigError(
            f"--config_file belongs behind the subcommand: headway config {subcommand} --config_file PATH"
        )


command = ConfigGroup(
    "config",
    callback=_config,
    invoke_without_command=True,
    params=[_FILE],
    commands={str(subcommand.name): subcommand for subcommand in _SUBCOMMANDS},
    help="Ask for the settings that this machine does not decide, write the config file, and print its path. Subcommands ask "
    "nothing.",
    epilog=examples(
        "headway config                              ask and write",
        "headway config default --mixed_precision bf16",
        "headway config show                         every setting with its origin",
        "headway config import accelerate.yaml       translate Accelerate's file",
    ),
    context_settings={"token_normalize_func": underscored, "help_option_names": ["-h", "--help"]},
)
