"""Micro-steps and gathers on two gloo processes, compared with plain torch and Accelerate.

`python benchmarks/run.py two_processes` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import find_command, get_num_repeats, save_result


def main() -> None:
    """Measure all variants in turn and write result.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        subprocess.run(
            [find_command("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.two_processes.worker", str(path),
             str(get_num_repeats(30))], check=True,
        )  # fmt: skip
        save_result("two_processes", "us per call", json.loads(path.read_text()))


if __name__ == "__main__":
    main()
