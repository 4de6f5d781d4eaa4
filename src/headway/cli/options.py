"""Command-line options made from the settings table, and a help page that groups them."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from headway.compat.accelerate.launch_flags import refuse
from headway.config.launch import SETTINGS, LaunchSetting
from headway.config.load import COMMAND_LINE, Value
from headway.config.values import did_you_mean, from_text


def underscored(token: str) -> str:
    """The spelling by which a flag is known: dashes and underscores mean the same."""
    return token.replace("-", "_")


class GroupedOption(click.Option):
    """An option that is listed under a heading of the help page."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help groups its options, and whose unknown flags are answered with what to use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {})
        kwargs["context_settings"] = {
            "token_normalize_func": underscored,
            "help_option_names": ["-h", "--help"],
            "max_content_width": 110,
            **kwargs["context_settings"],
        }
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and explain another launcher's flag."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse(error.option_name)
            hint = did_you_mean(error.option_name.lstrip("-"), [str(given.name) for given in self.params], prefix="--")
            raise click.UsageError(f"there is no flag {error.option_name}{hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order in which they were declared."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
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
    text = setting.text + (f"  [default: {setting.default}]" if setting.default else "")
    if setting.kind == "switch":
        return GroupedOption([*flags, setting.name], is_flag=True, default=None, help=text, group=setting.group)
    words = {"integer": "N", "number": "SECONDS", "text": "TEXT", "choice": "|".join(setting.choices)}
    words["truth"] = "true|false"
    words["number"] = "NUMBER" if setting.name == "gradient_clipping" else "SECONDS"
    return GroupedOption([*flags, setting.name], metavar=words[setting.kind], help=text, group=setting.group)


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


def examples(lines: Sequence[str]) -> str:
    """An epilog that shows commands."""
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines)
