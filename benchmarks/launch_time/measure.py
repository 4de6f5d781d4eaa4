"""What launching a script on one process costs beyond running it."""

import sys
from pathlib import Path

from benchmarks.timing import HAS_ACCELERATE, num_repeats, save, tool, whole_processes


def main() -> None:
    """Measure and save."""
    script = str(Path(__file__).with_name("script.py"))
    commands = {
        "python script.py": [sys.executable, script],
        "python script.py, again (A/A)": [sys.executable, script],
        "headway launch": [tool("headway"), "launch", "--cpu", "--num-processes", "1", script],
    }
    if HAS_ACCELERATE:
        commands["accelerate launch"] = [tool("accelerate"), "launch", "--cpu", "--num_processes", "1", script]
    save("launch_time", "s", whole_processes(commands, num_repeats(12)))


if __name__ == "__main__":
    main()
