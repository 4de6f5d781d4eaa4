"""Pretrained weights read straight into shards, measured: what each rank holds, reads, and takes at most.

`python -m tests.sweep.weights` writes a checkpoint of 2 GB and reads it on 2 ranks and on 8 under fsdp. A rank's peak may be its part
and 1.1 units, what it reads 1.1 times its part; so all ranks of a machine together hold one copy, and a unit each.
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
    """Measure; 1 where a rank holds or reads more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    chosen = parser.parse_args(arguments)
    unit, is_good = 4 * chosen.width**2, True
    print(f"{unit * chosen.blocks / MIB:,.0f} MiB in units of {unit / MIB:.0f} MiB, fsdp")
    print("| ranks | a rank's part | read | peak above the part, in units | all ranks' peaks together, in models |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_stack(folder, chosen.width, chosen.blocks)
        for num_ranks in chosen.ranks:
            found = run_ranks(measure_loading, num_ranks, folder, chosen.width, chosen.blocks, timeout=600)
            read = max(each["read"] / each["part"] for each in found)
            above = max((each["peak"] - each["part"]) / unit for each in found)
            together = sum(each["peak"] for each in found) / (unit * chosen.blocks)
            print(f"| {num_ranks} | {found[0]['part'] / MIB:,.0f} MiB | {read:.3f} x | {above:.2f} | {together:.2f} |")
            is_good &= read <= 1.1 and above <= 1.1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
