"""What a vote on the control plane costs with 2 and with 4 ranks, beside the store's round trip and gloo."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import num_repeats, save, tool


def main() -> None:
    """Measure and save."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (2, 4):
            path = Path(folder, "rows.json")
            subprocess.run(
                [tool("headway"), "launch", "--cpu", "-n", str(num_ranks), "-m", "benchmarks.control_cost.worker", str(path),
                 str(num_repeats(30))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save("control_cost", "us per call", rows, "the store's server is a further process, the launcher's agent")


if __name__ == "__main__":
    main()
