"""Command-line options made from the fields of `config/launch.py`, and a help page that fits a screen; `--help-all` has the rest.

What a command of minutes is at: one line that changes on a terminal, a line per step elsewhere, on standard error.
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headway.common.object_path import to_path
from headway.compat.accelerate.launching.config_file import refuse
from headway.config.launch import SETTINGS, LaunchSetting
from headway.config.load import COMMAND_LINE, Value
from headway.config.values import did_you_mean, from_text


def underscored(token: str) -> str:
    """The spelling by which a flag is known: dashes and underscores mean the same."""
    return token.replace("-", "_")


class PlaceType(click.ParamType):  # type: ignore[type-arg]
    """A folder, or a URL of an object store."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """As a path."""
        return to_path(value)


PLACE = PlaceType()
"""What reads checkpoints and runs takes."""


class GroupedOption(click.Option):
    """An option that is listed under a heading of the help page.

    Args:
        group: the heading.
        is_rare: listed by `--help-all` alone.
    """

    def __init__(self, *args: Any, group: str = "Options", is_rare: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.is_rare = is_rare

    def get_help_extra(self, ctx: click.Context) -> Any:
        """What click adds to the help, without the range of a number: an error names it."""
        return {name: value for name, value in super().get_help_extra(ctx).items() if name != "range"}


def option(name: str, metavar: str | None, group: str, text: str, kind: Any = None, **more: Any) -> GroupedOption:
    """An option in one line; without a metavar it is a switch, and a tuple of words as `kind` are all there is to choose."""
    if metavar is None:
        return GroupedOption([name], is_flag=True, group=group, help=text, **more)
    if isinstance(kind, tuple) and "|" in metavar:
        metavar, text = _show_choices(kind, text)
    chosen = click.Choice(kind) if isinstance(kind, tuple) else kind
    return GroupedOption([name], metavar=metavar, type=chosen, group=group, help=text, **more)


def _show_choices(choices: tuple[str, ...], text: str) -> tuple[str, str]:
    """The metavar and the text of an option: its words are the metavar if they are few, else in the text, where they wrap."""
    words = "|".join(choices)
    if len(words) <= _LONGEST_METAVAR:
        return words, text
    about, default, rest = text.partition("  [default")
    return "NAME", f"{about} One of {', '.join(choices)}.{default}{rest}"


_LONGEST_METAVAR = 20


JSON = GroupedOption(["--json", "as_json"], group="Output", is_flag=True, help="Print JSON.")
_WHERE = "Config file.  [default: the one that `headway config` writes]"
CONFIG_FILE = option("--config_file", "PATH", "Configuration", _WHERE, click.Path())


def _show_all(ctx: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_SHOWS_ALL = f"{__name__}.all"


class GroupedCommand(click.Command):
    """A command whose help lists the options that most runs need, and whose unknown flags are answered with what to use.

    Args:
        aliases: other names of flags, which the help does not show.
    """

    def __init__(self, *args: Any, aliases: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        known = aliases or {}
        kwargs["context_settings"] = {
            "token_normalize_func": lambda token: known.get(underscored(token), underscored(token)),
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
        """Parse, and explain another launcher's flag."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse(error.option_name)
            hint = did_you_mean(error.option_name.lstrip("-"), [str(given.name) for given in self.params], prefix="--")
            raise click.UsageError(f"there is no flag {error.option_name}{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in the order in which they were declared: the usual ones, or all under their headings."""
        params = self.get_params(ctx)
        is_short = any(getattr(each, "is_rare", False) for each in params) and _SHOWS_ALL not in ctx.meta
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
        """Write the examples as they stand."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog.rstrip() + "\n")


def setting_options() -> list[click.Parameter]:
    """One option for each setting of a launch."""
    return [_option(setting) for setting in SETTINGS.values()]


def _option(setting: LaunchSetting) -> click.Option:
    flags = [setting.short, setting.flag] if setting.short else [setting.flag]
    chosen, text = _show_choices(setting.choices, setting.text)
    about: dict[str, Any] = {"group": setting.group, "is_rare": not setting.is_usual}
    about["help"] = text + (f"  [default: {setting.default}]" if setting.default else "")
    if setting.kind == "switch":
        return GroupedOption([*flags, setting.name], is_flag=True, default=None, **about)
    words = {"integer": "N", "text": "TEXT", "choice": chosen, "truth": "true|false"}
    words["number"] = "NUMBER" if setting.name == "gradient_clipping" else "SECONDS"
    if setting.choices:
        about["shell_complete"] = lambda ctx, param, typed: [each for each in setting.choices if each.startswith(typed)]
    return GroupedOption([*flags, setting.name], metavar=words[setting.kind], **about)


def command_line_layer(given: Mapping[str, Any]) -> dict[str, Value]:
    """What the command line decides.

    Args:
        given: click's parsed values by setting; None where the flag was not given.

    Raises:
        ConfigError: a value cannot be read or is out of range.
    """
    layer = {}
    for name, raw in given.items():
        if raw is None:
            continue
        setting = SETTINGS[name]
        origin = f"{COMMAND_LINE}: {setting.flag}"
        layer[name] = Value(raw if isinstance(raw, bool) else from_text(setting, raw, origin), origin)
    return layer


def examples(*lines: str) -> str:
    """An epilog that shows commands."""
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines)


class _Status(logging.StreamHandler):  # type: ignore[type-arg]  # it cannot be subscripted in Python 3.10
    """Shows a record in the place of the one before."""

    terminator = ""

    def format(self, record: logging.LogRecord) -> str:
        """The text, behind what clears the line."""
        return f"\r\x1b[K{super().format(record)}"

    def close(self) -> None:
        """Clear the line."""
        self.stream.write("\r\x1b[K")
        super().close()


def show_progress() -> None:
    """Show what Headway's modules say of long work, until the command ends."""
    logger = logging.getLogger("headway")
    handler = _Status() if sys.stderr.isatty() else logging.StreamHandler()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def end() -> None:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()

    click.get_current_context().call_on_close(end)
