"""Run one step in this process: `python -m benchmarks.gpu.step MODULE --device cpu --size small --rows FILE`; the runner calls it."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.plan import SIZES


def main() -> int:
    """Run the step. Return 1 if a part of it failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    bench = Bench(options.device, options.size, options.rows)
    import_module(options.module).run(bench)
    return int(bench.has_failed)


if __name__ == "__main__":
    sys.exit(main())
