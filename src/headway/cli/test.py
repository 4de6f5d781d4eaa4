"""`headway test`: start the self-check the way `launch` would start a script."""

from typing import Any

import click

from headway.cli.launch import start
from headway.cli.options import GroupedCommand, GroupedOption, examples, setting_options

_ABOUT = """Check this set-up: start Headway's self-check as `headway launch` would start a script with the same flags.

It compares data order, gradients, collectives, random streams and metrics of the real run with what one process computes,
says what it checked and how long it took, and exits 0 only if all is right.
"""

_EPILOG = examples(
    [
        "headway test                            as `headway launch` would run here",
        "headway test -n 2 --cpu                 two processes on the CPU",
        "headway test --strategy fsdp            a sharded layout",
        "headway test --config_file my.yaml      the settings of a file",
    ]
)


def _test(config_file: str | None, dry_run: bool, **given: Any) -> None:
    start("headway.checks.selfcheck", (), config_file, dry_run, False, **{**given, "module": True, "no_python": None})


def _parameters() -> list[click.Parameter]:
    settings = [option for option in setting_options() if option.name not in ("module", "no_python")]
    return [
        *settings,
        GroupedOption(
            ["--config_file"],
            metavar="PATH",
            group="Configuration",
            help="Config file.  [default: the one that `headway config` writes]",
        ),
        GroupedOption(["--dry_run"], is_flag=True, group="Configuration", help="Print the command, and start nothing."),
    ]


command = GroupedCommand("test", callback=_test, params=_parameters(), help=_ABOUT, epilog=_EPILOG)
