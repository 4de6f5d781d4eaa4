"""Time to launch a script on one process beyond the time to run it.

`python benchmarks/run.py launch_time` runs it, and rewrites the table in benchmarks/README.md.
"""

import sys
from pathlib import Path

from benchmarks.timing import HAS_ACCELERATE, find_command, get_num_repeats, save_result, time_commands


def main() -> None:
    """Measure all variants in turn and write result.json."""
    script = str(Path(__file__).with_name("script.py"))
    commands = {
        "python script.py": [sys.executable, script],
        "python script.py, again (A/A)": [sys.executable, script],
        "headway launch": [find_command("headway"), "launch", "--cpu", "--num-processes", "1", script],
    }
    if HAS_ACCELERATE:
        commands["accelerate launch"] = [find_command("accelerate"), "launch", "--cpu", "--num_processes", "1", script]
    save_result("launch_time", "s", time_commands(commands, get_num_repeats(12)))


if __name__ == "__main__":
    main()
