"""What automatic micro-batching costs while nothing happens, on one process and on two, and memory after many failures."""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import num_repeats, save, tool

NOTE = (
    "10 M parameters, 64 rows a batch, Adam. 'plain': gradient accumulation without automatic micro-batching (DDP's reducer on two "
    "processes). On two processes the difference holds the lost overlap and what DDP's buckets cost beside it"
)


def main() -> None:
    """Measure and save."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2):
            path = Path(folder, f"rows{world_size}.json")
            subprocess.run(
                [tool("headway"), "launch", "--cpu", "-n", str(world_size), "-m", "benchmarks.microbatching.worker", str(path),
                 str(num_repeats(20))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save("microbatching", "ms per batch", rows, NOTE)


if __name__ == "__main__":
    main()
