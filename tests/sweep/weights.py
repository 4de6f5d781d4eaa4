"""Measures pretrained weights that are read directly into shards: the size of each rank's part, bytes read, and peak memory.

`python -m tests.sweep.weights` writes a checkpoint of 2 GB and reads it on 2 and on 8 ranks with fsdp. A rank's peak
may be its part plus 1.1 units, and it may read 1.1 times its part. All ranks of a machine together therefore hold one
copy, and one unit each.
"""

import argparse
import sys
import tempfile

from tests.distributed.ranks import run_ranks
from tests.distributed.test_pretrained import measure_loading, write_stack

WIDTH, NUM_BLOCKS = 4096, 30
"""30 units of 64 MiB."""
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Measure, and return 1 if a rank uses or reads more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    args = parser.parse_args(arguments)
    unit, is_good = 4 * args.width**2, True
    print(f"{unit * args.blocks / MIB:,.0f} MiB in units of {unit / MIB:.0f} MiB, fsdp")
    print("| ranks | a rank's part | read | peak above the part, in units | all ranks' peaks together, in models |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_stack(folder, args.width, args.blocks)
        for num_ranks in args.ranks:
            found = run_ranks(measure_loading, num_ranks, folder, args.width, args.blocks, timeout=600)
            read = max(each["read"] / each["part"] for each in found)
            above = max((each["peak"] - each["part"]) / unit for each in found)
            together = sum(each["peak"] for each in found) / (unit * args.blocks)
            print(f"| {num_ranks} | {found[0]['part'] / MIB:,.0f} MiB | {read:.3f} x | {above:.2f} | {together:.2f} |")
            is_good &= read <= 1.1 and above <= 1.1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
