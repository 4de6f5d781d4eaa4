"""CPU time of a sharded step on two gloo processes: prepared by Headway, compared with hand-written fully_shard and Accelerate.

`python benchmarks/run.py layouts` runs it, and rewrites the table in benchmarks/README.md.
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
            [find_command("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.layouts.worker", str(path),
             str(get_num_repeats(20))], check=True,
        )  # fmt: skip
        save_result("layouts", "ms per step", json.loads(path.read_text()))


if __name__ == "__main__":
    main()
