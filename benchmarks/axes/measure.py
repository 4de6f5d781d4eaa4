"""Steps under each axis, and products of them, beside the same steps by hand with torch: ratios of repeats side by side (gloo)."""

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.timing import num_repeats, save, tool

AXES = {"tp": 2, "cp": 2, "ep": 2, "pp": 2, "pp=2+fsdp": 4, "pp=2+cp=2": 4, "fsdp+ep=2": 4, "ep=2+tp=2": 4}


def main() -> None:
    """Measure and save."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout, num_ranks in AXES.items():
            path = Path(folder, f"{layout}.json")
            subprocess.run(
                [tool("headway"), "launch", "--cpu", "-n", str(num_ranks), "-m", "benchmarks.axes.worker", layout, str(path),
                 str(num_repeats(20))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save("axes", "ms per step", rows)


if __name__ == "__main__":
    main()
