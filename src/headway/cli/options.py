"""Command-line options made from the fields of `config/launch.py`, and a help page that groups them."""

from collections.abc import Mapping
from typing import Any

import click

from headway.compat.accelerate.launching.launch_flags import refuse
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


def option(name: str, metavar: str | None, group: str, text: str, kind: Any = None, **more: Any) -> GroupedOption:
    """An option in one line; without a metavar it is a switch, and a tuple of words as `kind` are all there is to choose."""
    if metavar is None:
        return GroupedOption([name], is_flag=True, group=group, help=text, **more)
    chosen = click.Choice(kind) if isinstance(kind, tuple) else kind
    return GroupedOption([name], metavar=metavar, type=chosen, group=group, help=text, **more)


POSITIVE = click.IntRange(min=1)
_OF_MODELS = {
    "batch_size": ("N", "Samples of a micro-batch, on each data shard.  [default: 1]", POSITIVE),
    "sequence": ("N", "Tokens per sample.  [default: what the model allows, up to 4096", POSITIVE),
    "optimizer": (
        "NAME",
        "adamw, adam, sgd, momentum, adagrad, rmsprop, adafactor, adamw8bit, muon or none.  [default: adamw]",
        str,
    ),
    "precision": ("no|bf16|fp16", "The run's mixed_precision.", ("no", "bf16", "fp16")),
    "activation_checkpointing": (None, "Keep only the inputs of blocks for backward, and recompute the rest.", None),
    "ranks": ("N", "Processes of the run.", POSITIVE),
    "strategy": ("LAYOUT", "ddp, fsdp, hsdp=8, tp, fsdp+tp=2 ...", str),
    "machine_ranks": ("N", "Ranks on one machine.  [default: 8]", POSITIVE),
    "budget": ("SIZE", "Memory that each process may take, such as 20GiB.", str),
}
JSON = GroupedOption(["--json", "as_json"], group="Output", is_flag=True, help="Print JSON.")
CONFIG_FILE = option(
    "--config_file", "PATH", "Configuration", "Config file.  [default: the one that `headway config` writes]"
)
EARLIER_NAMES = {
    "accumulation": "gradient_accumulation_steps",
    "mixed_precision": "precision",
    "batch": "batch_size",
    "checkpoint_activations": "activation_checkpointing",
    "memory": "budget",
    "num_tokens": "sequence",
    "recompute": "activation_checkpointing",
}
"""Other names of options of `estimate` and `plan`: earlier ones, accepted until the next release, and those of launch."""


def model_option(name: str, group: str, more: str = "", **settings: Any) -> GroupedOption:
    """An option that the commands about a model share: the same name, and the same text before `more`."""
    metavar, text, kind = _OF_MODELS[name]
    return option(f"--{name}", metavar, group, text + more, kind, **settings)


class GroupedCommand(click.Command):
    """A command whose help groups its options, and whose unknown flags are answered with what to use.

    Args:
        aliases: other names of flags, which the help does not show.
    """

    def __init__(self, *args: Any, aliases: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        known = aliases or {}
        kwargs["context_settings"] = {
            "token_normalize_func": lambda token: known.get(underscored(token), underscored(token)),
            "help_option_names": ["-h", "--help"],
            "max_content_width": 110,
            **kwargs.get("context_settings", {}),
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


def examples(*lines: str) -> str:
    """An epilog that shows commands."""
    return "Examples:\n" + "\n".join(f"  {line}" for line in lines)
