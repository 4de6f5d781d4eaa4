"""Cost of automatic micro-batching while memory suffices, on one process and on two, and memory after many failures.

`python benchmarks/run.py microbatching` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import find_command, get_num_repeats, save_result

NOTE = (
    "10 M parameters, 64 rows a batch, Adam. 'plain': gradient accumulation without automatic micro-batching (DDP's reducer on two "
    "processes). On two processes the difference includes the lost overlap of communication and the cost of DDP's buckets"
)


def main() -> None:
    """Measure all variants in turn and write result.json."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2):
            path = Path(folder, f"rows{world_size}.json")
            subprocess.run(
                [find_command("headway"), "launch", "--cpu", "-n", str(world_size), "-m", "benchmarks.microbatching.worker",
                 str(path), str(get_num_repeats(20))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save_result("microbatching", "ms per batch", rows, NOTE)


if __name__ == "__main__":
    main()
