"""Saving and loading an FSDP2 model on two gloo processes of this machine, beside torch.distributed.checkpoint."""

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
            [tool("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.sharded_checkpoint.worker", str(path),
             str(num_repeats(7))], check=True,
        )  # fmt: skip
        rows, note = json.loads(path.read_text())
        save("sharded_checkpoint", "ms", rows, note=note)


if __name__ == "__main__":
    main()
