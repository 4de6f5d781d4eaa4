"""CPU time of a sharded step on two gloo processes of this machine: prepared, beside hand-written fully_shard and Accelerate."""

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
            [tool("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.layouts.worker", str(path),
             str(num_repeats(20))], check=True,
        )  # fmt: skip
        save("layouts", "CPU ms per step of one rank", json.loads(path.read_text()))


if __name__ == "__main__":
    main()
