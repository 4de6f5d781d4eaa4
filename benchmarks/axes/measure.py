"""Training steps under each parallel layout and combinations of them, compared with hand-written torch code (gloo ranks).

`python benchmarks/run.py axes` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import find_command, get_num_repeats, save_result

AXES = {"tp": 2, "cp": 2, "ep": 2, "pp": 2, "pp=2+fsdp": 4, "pp=2+cp=2": 4, "fsdp+ep=2": 4, "ep=2+tp=2": 4}


def main() -> None:
    """Measure all variants in turn and write result.json."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout, num_ranks in AXES.items():
            path = Path(folder, f"{layout}.json")
            subprocess.run(
                [find_command("headway"), "launch", "--cpu", "-n", str(num_ranks), "-m", "benchmarks.axes.worker", layout, str(path),
                 str(get_num_repeats(20))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save_result("axes", "ms per step", rows)


if __name__ == "__main__":
    main()
