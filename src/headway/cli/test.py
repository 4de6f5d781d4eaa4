"""`headway test`: start the self-check the way `launch` would start a script."""

from typing import Any

from headway.cli.launch import start
from headway.cli.options import CONFIG_FILE, GroupedCommand, examples, option, setting_options

_ABOUT = """Check this set-up: start Headway's self-check as `headway launch` would start a script with the same flags.

It compares data order, gradients, collectives, RNG states and metrics of the real run with what one process computes,
says what it checked and how long it took, and exits 0 only if all is right.
"""

_EPILOG = examples(
    "headway test                            as `headway launch` would run here",
    "headway test -n 2 --cpu                 two processes on the CPU",
    "headway test --strategy fsdp            a sharded layout",
    "headway test --config_file my.yaml      the settings of a file",
)


def _test(config_file: str | None, dry_run: bool, **given: Any) -> None:
    start(
        "headway.cli.checks.selfcheck", (), config_file, dry_run, False, **{**given, "module": True, "no_python": None}
    )


_PARAMS = [
    *(each for each in setting_options() if each.name not in ("module", "no_python")),
    CONFIG_FILE,
    option("--dry_run", None, "Configuration", "Print the command, and start nothing."),
]
command = GroupedCommand("test", callback=_test, params=_PARAMS, help=_ABOUT, epilog=_EPILOG)
