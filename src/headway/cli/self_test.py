"""`headway test`: run Headway's checks on the processes that a launch with the current settings would start."""

from typing import Any

from headway.cli.launch import start_script
from headway.cli.options import (
    CONFIG_FILE,
    GroupedCommand,
    format_examples,
    make_option,
    make_setting_options,
)

_ABOUT_TEST = """Check this set-up: start Headway's self-check as `headway launch` would start a script with the same flags.

It compares data order, gradients, collectives, RNG states and metrics of the real run with what one process computes,
says what it checked and how long it took, and exits 0 only if all is right.
"""

_EPILOG_TEST = format_examples(
    "headway test                            as `headway launch` would run here",
    "headway test -n 2 --cpu                 two processes on the CPU",
    "headway test --strategy fsdp            a sharded layout",
    "headway test --config_file my.yaml      the settings of a file",
)


def _run_test(config_file: str | None, dry_run: bool, **given: Any) -> None:
    start_script(
        "headway.cli.checks", ("test",), config_file, dry_run, False, **{**given, "module": True, "no_python": None}
    )


_TEST_PARAMS = [
    *(each for each in make_setting_options() if each.name not in ("module", "no_python")),
    CONFIG_FILE,
    make_option("--dry_run", None, "Configuration", "Print the command, and start nothing."),
]

test = GroupedCommand("test", callback=_run_test, params=_TEST_PARAMS, help=_ABOUT_TEST, epilog=_EPILOG_TEST)
