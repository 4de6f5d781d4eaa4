"""Command-line options generated from the settings of a launch, and help pages with headings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from headway.common.object_path import expand_home, to_path
from headway.compat.accelerate.launching.config_file import refuse_accelerate_flag
from headway.core.config.launch import SETTINGS, LaunchSetting
from headway.core.config.load import COMMAND_LINE, SettingValue
from headway.core.config.values import parse_text, suggest_word


def replace_dashes(token: str) -> str:
    """Return the name of a flag with underscores in place of dashes, as in the names of settings.

    The name must not include the flag's leading dashes, because they would be replaced too.
    """
    return token.replace("-", "_")


class PlaceType(click.ParamType):  # type: ignore[type-arg]
    """click type for the path of a folder or the URL of an object store."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return a `Path` for a path that the user typed, or an `ObjectPath` for a URL."""
        return to_path(value)


PLACE = PlaceType()
"""click type for the path or URL of a checkpoint or run that a command reads."""


class LocalPath(click.Path):
    """click type for a local path. A leading `~` is replaced by the home directory.

    Shells replace `~` in `--out ~/page.html`, but bash does not in `--out=~/page.html`.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as text, or as the type that was passed as `path_type`."""
        return super().convert(expand_home(value), param, ctx)


class GroupedOption(click.Option):
    """Command-line option that the help page lists under a heading.

    Args:
        args, kwargs: Arguments of click.Option.
        group: Heading. Default: "Options".
        is_rare: Whether only `--help-all` lists the option. Default: False.
    """

    def __init__(self, *args: Any, group: str = "Options", is_rare: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.is_rare = is_rare

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the details that click appends to the help text, such as the default.

        The allowed range of a number is left out, because error messages contain it.
        """
        return {name: value for name, value in super().get_help_extra(ctx).items() if name != "range"}


def make_option(
    name: str, metavar: str | None, group: str, text: str, value_type: Any = None, **attributes: Any
) -> GroupedOption:
    """Create a command-line option that the help page lists under a heading.

    Args:
        name: Flag, such as "--tensors".
        metavar: Placeholder of the value in the help; None for a switch without a value. If it contains "|" and
            `value_type` is a tuple, the help shows the allowed words instead.
        group: Heading.
        text: Help text.
        value_type: click type of the value, or a tuple with the allowed words. None: click's default type, which is
            text.
        attributes: Other arguments of click.Option.
    """
    if metavar is None:
        return GroupedOption([name], is_flag=True, group=group, help=text, **attributes)
    if isinstance(value_type, tuple) and "|" in metavar:
        metavar, text = _format_choices(value_type, text)
    click_type = click.Choice(value_type) if isinstance(value_type, tuple) else value_type
    return GroupedOption([name], metavar=metavar, type=click_type, group=group, help=text, **attributes)


def _format_choices(choices: tuple[str, ...], text: str) -> tuple[str, str]:
    """Return the metavar (placeholder of the value) and the help text of an option with choices.

    If the choices are few and short, the metavar lists them. Otherwise the help text does, because it can be wrapped.
    """
    words = "|".join(choices)
    if len(words) <= _LONGEST_METAVAR:
        return words, text
    about, default, rest = text.partition("  [default")
    return "NAME", f"{about} One of {', '.join(choices)}.{default}{rest}"


_LONGEST_METAVAR = 20

JSON = GroupedOption(["--json", "as_json"], group="Output", is_flag=True, help="Print JSON.")

_WHERE = "Config file.  [default: the one that `headway config` writes]"

CONFIG_FILE = make_option("--config_file", "PATH", "Configuration", _WHERE, LocalPath())


def _show_all(ctx: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    """Print the help page with all options, and exit."""
    if is_given:
        ctx.meta[_SHOWS_ALL_KEY] = True
        click.echo(ctx.get_help())
        ctx.exit()


_SHOWS_ALL_KEY = f"{__name__}.all"


class GroupedCommand(click.Command):
    """Command whose help lists the common options, and whose errors suggest a replacement for an unknown flag.

    Args:
        args, kwargs: Arguments of click.Command.
        aliases: Mapping from alternative option names, which are accepted but not shown in the help, to current names.
            None (the default): no other names.
    """

    def __init__(self, *args: Any, aliases: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        current_names = aliases or {}
        kwargs["context_settings"] = {
            "token_normalize_func": lambda token: current_names.get(replace_dashes(token), replace_dashes(token)),
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            **kwargs.get("context_settings", {}),
        }
        super().__init__(*args, **kwargs)
        if any(getattr(each, "is_rare", False) for each in self.params):
            text = "Show every option, in groups, and exit."
            more: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
            self.params.append(GroupedOption(["--help-all"], help=text, **more))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and return those that are left.

        Raises:
            ConfigError: If only another launcher has a flag. The message names an alternative.
            click.UsageError: If a flag is unknown for another reason. The message suggests a similar flag, if any.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse_accelerate_flag(error.option_name)
            hint = suggest_word(
                error.option_name.lstrip("-"), [str(parameter.name) for parameter in self.params], prefix="--"
            )
            raise click.UsageError(f"there is no flag {error.option_name}{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options to the help page, grouped by heading.

        If the command has rare options, only `--help-all` shows them and the headings. Otherwise all options are shown.
        """
        params = self.get_params(ctx)
        is_short = any(getattr(each, "is_rare", False) for each in params) and _SHOWS_ALL_KEY not in ctx.meta
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in params:
            record = parameter.get_help_record(ctx)
            if record is None or not isinstance(parameter, click.Option):
                continue
            if not is_short:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
            elif not getattr(parameter, "is_rare", False):
                groups.setdefault("Options", []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=32)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example commands at the end of the help page without wrapping their lines."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog.rstrip() + "\n")


def make_script_arguments() -> list[click.Argument]:
    """Return the arguments of a command that starts a script: SCRIPT, and the script's own arguments, unchanged."""
    return [
        click.Argument(["script"], metavar="SCRIPT", type=click.Path()),
        click.Argument(
            ["script_args"],
            metavar="[ARGS]...",
            nargs=-1,
            type=click.UNPROCESSED,
            shell_complete=lambda ctx, param, typed: [CompletionItem(typed, type="file")],
        ),
    ]


def make_setting_options() -> list[click.Parameter]:
    """Return the command-line options of a launch, one per setting."""
    return [_make_setting_option(setting) for setting in SETTINGS.values()]


def _make_setting_option(setting: LaunchSetting) -> click.Option:
    """Return the command-line option for a setting of a launch. Its value is None if the user did not give it."""
    flags = [setting.short, setting.flag] if setting.short else [setting.flag]
    metavar, help_text = _format_choices(setting.choices, setting.text)
    attributes: dict[str, Any] = {"group": setting.group, "is_rare": not setting.is_in_short_help}
    attributes["help"] = help_text + (f"  [default: {setting.default}]" if setting.default else "")
    if setting.kind == "switch":
        return GroupedOption([*flags, setting.name], is_flag=True, default=None, **attributes)
    metavars = {"integer": "N", "text": "TEXT", "choice": metavar, "truth": "true|false"}
    # Every number is a duration, with one exception.
    metavars["number"] = "NUMBER" if setting.name == "gradient_clipping" else "SECONDS"
    if setting.choices:
        attributes["shell_complete"] = lambda ctx, param, typed: [
            each for each in setting.choices if each.startswith(typed)
        ]
    return GroupedOption([*flags, setting.name], metavar=metavars[setting.kind], **attributes)


def read_command_line_layer(flag_values: Mapping[str, Any]) -> dict[str, SettingValue]:
    """Return the settings given on the command line.

    Args:
        flag_values: Values from the command line by setting name; None if a flag was not given.

    Raises:
        ConfigError: If a value cannot be parsed or is out of range.
    """
    settings = {}
    for name, raw in flag_values.items():
        if raw is None:
            continue
        setting = SETTINGS[name]
        origin = f"{COMMAND_LINE}: {setting.flag}"
        settings[name] = SettingValue(raw if isinstance(raw, bool) else parse_text(setting, raw, origin), origin)
    return settings


def format_examples(*lines: str) -> str:
    """Return a text with one example command per line, for the end of a help page."""
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines)
