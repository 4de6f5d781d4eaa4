"""Micro-steps and gathers on two gloo processes of this machine, beside plain torch and Accelerate."""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import num_repeats, save, tool


def main() -> None:
    """Measure and save."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        subprocess.run(
            [tool("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.two_processes.worker", str(path),
             str(num_repeats(30))], check=True,
        )  # fmt: skip
        save("two_processes", "us per call", json.loads(path.read_text()))


if __name__ == "__main__":
    main()
