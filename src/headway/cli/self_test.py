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

_ABOUT_TEST = """Check the setup: run Headway's self-check in the processes that `headway launch` would start with the same options.

The check compares data order, gradients, collectives, RNG states and metrics with those of one process, and prints each
comparison and the time it took. The exit code is 0 only if all are correct.
"""

_EPILOG_TEST = format_examples(
    "headway test                            as `headway launch` would run here",
    "headway test -n 2 --cpu                 two processes on the CPU",
    "headway test --strategy fsdp            a sharded layout",
    "headway test --config_file my.yaml      the settings of a file",
)


def _run_test(config_file: str | None, dry_run: bool, **flag_values: Any) -> None:
    """Start the test program on the ranks that the settings describe.

    Args:
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        dry_run: Whether to print the command and start nothing.
        **flag_values: Values from the command line by setting name; None if a flag was not given.
    """
    flag_values |= {"module": True, "no_python": None}
    start_script("headway.cli.checks", ("test",), config_file, dry_run, force=False, **flag_values)


_TEST_PARAMS = [
    *(each for each in make_setting_options() if each.name not in ("module", "no_python")),
    CONFIG_FILE,
    make_option("--dry_run", None, "Configuration", "Print the command, and start nothing."),
]

test = GroupedCommand("test", callback=_run_test, params=_TEST_PARAMS, help=_ABOUT_TEST, epilog=_EPILOG_TEST)
