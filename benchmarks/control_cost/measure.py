"""Cost of a vote over the control plane with 2 and with 4 ranks, compared with a round trip to the store and with gloo.

`python benchmarks/run.py control_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import find_command, get_num_repeats, save_result


def main() -> None:
    """Measure all variants in turn and write result.json."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (2, 4):
            path = Path(folder, "rows.json")
            subprocess.run(
                [find_command("headway"), "launch", "--cpu", "-n", str(num_ranks), "-m", "benchmarks.control_cost.worker", str(path),
                 str(get_num_repeats(30))], check=True,
            )  # fmt: skip
            rows |= json.loads(path.read_text())
    save_result("control_cost", "us per call", rows, "The store's server runs in another process, the launcher's agent")


if __name__ == "__main__":
    main()
