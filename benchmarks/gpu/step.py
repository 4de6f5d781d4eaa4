"""One step in its own process; the runner starts it: `python -m benchmarks.gpu.step MODULE --device cpu --size small --rows FILE`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.plan import SIZES


def main() -> int:
    """Run it; the exit code is 1 where a part of it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    given = parser.parse_args()
    bench = Bench(given.device, given.size, given.rows)
    import_module(given.module).run(bench)
    return int(bench.has_failed)


if __name__ == "__main__":
    sys.exit(main())
