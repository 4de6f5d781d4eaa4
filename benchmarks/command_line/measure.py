"""How long a help text takes, as a whole process."""

import sys

from benchmarks.timing import HAS_ACCELERATE, num_repeats, save, tool, whole_processes


def main() -> None:
    """Measure and save."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c pass, again (A/A)": [sys.executable, "-c", "pass"],
        "headway --help": [tool("headway"), "--help"],
        "headway launch --help": [tool("headway"), "launch", "--help"],
    }
    if HAS_ACCELERATE:
        commands["accelerate launch --help"] = [tool("accelerate"), "launch", "--help"]
    save("command_line", "s", whole_processes(commands, num_repeats(15)))


if __name__ == "__main__":
    main()
