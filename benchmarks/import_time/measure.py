"""What importing the library costs beyond importing torch."""

import sys

from benchmarks.timing import HAS_ACCELERATE, num_repeats, save, whole_processes


def main() -> None:
    """Measure and save."""
    lines = {
        "import torch": "import torch",
        "import torch, again (A/A)": "import torch",
        "from headway import Accelerator": "from headway import Accelerator",
    }
    if HAS_ACCELERATE:
        lines["from accelerate import Accelerator"] = "from accelerate import Accelerator"
    rows = whole_processes({name: [sys.executable, "-c", line] for name, line in lines.items()}, num_repeats(15))
    floor = rows["import torch"]
    for row in rows.values():
        if isinstance(row, dict):
            row["ratio cpu"] = round(row["cpu"]["median"] / floor["cpu"]["median"], 3)
    save("import_time", "s", rows)


if __name__ == "__main__":
    main()
