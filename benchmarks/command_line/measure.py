"""Time of `--help`, measured as a whole process.

`python benchmarks/run.py command_line` runs it, and rewrites the table in benchmarks/README.md.
"""

import sys

from benchmarks.timing import HAS_ACCELERATE, find_command, get_num_repeats, save_result, time_commands


def main() -> None:
    """Measure all variants in turn and write result.json."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c pass, again (A/A)": [sys.executable, "-c", "pass"],
        "headway --help": [find_command("headway"), "--help"],
        "headway launch --help": [find_command("headway"), "launch", "--help"],
    }
    if HAS_ACCELERATE:
        commands["accelerate launch --help"] = [find_command("accelerate"), "launch", "--help"]
    save_result("command_line", "s", time_commands(commands, get_num_repeats(15)))


if __name__ == "__main__":
    main()
