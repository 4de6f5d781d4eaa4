"""Time to import the library beyond the time to import torch.

`python benchmarks/run.py import_time` runs it, and rewrites the table in benchmarks/README.md.
"""

import sys

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, save_result, time_commands


def main() -> None:
    """Measure all variants in turn and write result.json."""
    lines = {
        "import torch": "import torch",
        "import torch, again (A/A)": "import torch",
        "from headway import Accelerator": "from headway import Accelerator",
    }
    if HAS_ACCELERATE:
        lines["from accelerate import Accelerator"] = "from accelerate import Accelerator"
    rows = time_commands({name: [sys.executable, "-c", line] for name, line in lines.items()}, get_num_repeats(15))
    floor = rows["import torch"]
    for row in rows.values():
        if isinstance(row, dict):
            row["ratio cpu"] = round(row["cpu"]["median"] / floor["cpu"]["median"], 3)
    save_result("import_time", "s", rows)


if __name__ == "__main__":
    main()
