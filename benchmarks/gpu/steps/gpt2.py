"""GPT-2 124M in bf16: tokens a second by hand, through Headway and through Accelerate, eager and compiled."""

from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import FULL, SMALL, SMALLEST, Loop, by_hand, gpt2, parts, through
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE

ANCHOR = 0.99


def run(bench: Bench) -> None:
    """Eager, then compiled."""
    with bench.attempt("eager"):
        compare(bench, is_compiled=False)
    if bench.size == "smallest":
        bench.row(Row("compiled", note="left out at the smallest size"))
    elif bench.no_compiler:
        bench.row(Row("compiled", note=bench.no_compiler))
    else:
        with bench.attempt("compiled"):
            compare(bench, is_compiled=True)


def compare(bench: Bench, is_compiled: bool) -> None:
    """All loops in turn, each with a model of its own."""
    kind = "compiled" if is_compiled else "eager"
    sizes, batch, num_updates = bench.choose((FULL, 16, 8), (SMALL, 4, 2), (SMALLEST, 2, 2))
    repeats = bench.choose(6, 3, 2)

    def made() -> tuple[Any, ...]:
        model = gpt2(bench, sizes)
        return parts(bench, torch.compile(model) if is_compiled else model, sizes, batch, num_updates)

    loops: dict[str, Loop] = {
        "by hand": by_hand(bench, made()), "by hand, again (A/A)": by_hand(bench, made()),
        "headway": through("headway", bench, made()),
    }  # fmt: skip
    if HAS_ACCELERATE:
        loops["accelerate"] = through("accelerate", bench, made())
    for name, loop in loops.items():
        bench.say(f"  {kind}, {name}: the first pass took {bench.seconds(loop):.1f} s")
    found = bench.rates(loops, batch * sizes["n_positions"] * num_updates, repeats)
    floor = found["by hand"]["median"]
    for name, rate in found.items():
        # A shared CPU's spread is wider than the anchor.
        is_judged = name == "headway" and not bench.is_cpu and not bench.is_simulated
        bench.row(
            Row(
                f"{kind}, {name}", rate["median"], "tokens/s", None if name == "by hand" else floor, "by hand",
                f"at least {ANCHOR} of by hand" if is_judged else "", rate["median"] >= ANCHOR * floor if is_judged else None,
                f"quartiles {rate['low']:,.0f} to {rate['high']:,.0f}; {batch} x {sizes['n_positions']} tokens an update",
            )
        )  # fmt: skip
    if not HAS_ACCELERATE:
        bench.row(Row(f"{kind}, accelerate", note=ACCELERATE_MISSING))
