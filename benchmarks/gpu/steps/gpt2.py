"""GPT-2 124M in bf16, eager and compiled: tokens per second in plain PyTorch, with Headway and with Accelerate.

`python -m benchmarks.gpu gpt2` runs only this step; with `--device cpu`, at a small size.
"""

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import (
    FULL,
    SMALL,
    SMALLEST,
    Loop,
    build_gpt2,
    build_training,
    make_library_loop,
    make_plain_loop,
)
from benchmarks.step_cost.measure import Training
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE

TARGET = 0.99
"""Least speed of Headway, as a share of the hand-written loop's."""


def run(bench: Bench) -> None:
    """Compare the loops in eager mode, then compiled."""
    with bench.attempt("eager"):
        compare(bench, is_compiled=False)
    if bench.size == "smallest":
        bench.add_row(Row("compiled", note="left out at the smallest size"))
    elif bench.missing_compiler:
        bench.add_row(Row("compiled", note=bench.missing_compiler))
    else:
        with bench.attempt("compiled"):
            compare(bench, is_compiled=True)


def compare(bench: Bench, is_compiled: bool) -> None:
    """Compare all loops in turn, each with a new model."""
    mode = "compiled" if is_compiled else "eager"
    sizes, batch, num_updates = bench.choose((FULL, 16, 8), (SMALL, 4, 2), (SMALLEST, 2, 2))
    repeats = bench.choose(6, 3, 2)

    def build() -> Training:
        model = build_gpt2(bench, sizes)
        return build_training(bench, torch.compile(model) if is_compiled else model, sizes, batch, num_updates)

    loops: dict[str, Loop] = {
        "by hand": make_plain_loop(bench, build()), "by hand, again (A/A)": make_plain_loop(bench, build()),
        "headway": make_library_loop("headway", bench, build()),
    }  # fmt: skip
    if HAS_ACCELERATE:
        loops["accelerate"] = make_library_loop("accelerate", bench, build())
    for name, loop in loops.items():
        bench.print_line(f"  {mode}, {name}: the first pass took {bench.measure_seconds(loop):.1f} s")
    rates = bench.measure_rates(loops, batch * sizes["n_positions"] * num_updates, repeats)
    floor = rates["by hand"]["median"]
    for name, rate in rates.items():
        # The times of a shared CPU vary by more than the target allows.
        is_judged = name == "headway" and not bench.is_cpu and not bench.is_simulated
        bench.add_row(
            Row(
                f"{mode}, {name}", rate["median"], "tokens/s", None if name == "by hand" else floor, "by hand",
                f"at least {TARGET} of by hand" if is_judged else "", rate["median"] >= TARGET * floor if is_judged else None,
                f"quartiles {rate['low']:,.0f} to {rate['high']:,.0f}; {batch} x {sizes['n_positions']} tokens per update",
            )
        )  # fmt: skip
    if not HAS_ACCELERATE:
        bench.add_row(Row(f"{mode}, accelerate", note=ACCELERATE_MISSING))
