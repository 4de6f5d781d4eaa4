"""Time to save and load an FSDP2 model on two gloo processes, compared with torch.distributed.checkpoint.

`python benchmarks/run.py sharded_checkpoint` runs it, and rewrites the table in benchmarks/README.md.
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
            [find_command("headway"), "launch", "--cpu", "-n", "2", "-m", "benchmarks.sharded_checkpoint.worker", str(path),
             str(get_num_repeats(7))], check=True,
        )  # fmt: skip
        rows, note = json.loads(path.read_text())
        save_result("sharded_checkpoint", "ms", rows, note=note)


if __name__ == "__main__":
    main()
