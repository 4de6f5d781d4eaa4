"""Activations in host memory compared with recomputed activations: tokens/s and peak memory of a GPT-2 of 355 million parameters.

`python -m benchmarks.gpu activations` runs only this step; with `--device cpu`, at a small size.
"""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import MEDIUM, SMALL, SMALLEST, build_gpt2, compute_loss, make_accelerator, make_tokens

VARIANTS: dict[str, Mapping[str, Any] | None] = {
    "all kept on the device": None,
    "recomputed": {},
    "all kept in host memory": {"policy": "keep_all", "offload": True},
    "recomputed, block inputs in host memory": {"offload": True},
}


def run(bench: Bench) -> None:
    """Measure each variant with a new model, and compare it with the first variant."""
    if bench.is_cpu:
        bench.print_line("  on a CPU nothing is offloaded: rows with host memory show only the remaining effects")
    floor: tuple[float, float] | None = None
    for name, options in VARIANTS.items():
        bench.release()
        with bench.attempt(name):
            speed, peak = measure(bench, options)
            floor_speed, floor_peak = floor or (None, None)
            bench.add_row(Row(f"{name}: speed", speed, "tokens/s", floor_speed, "all kept on the device"))
            bench.add_row(Row(f"{name}: peak", round(peak / 2**20), "MiB", floor_peak, "all kept on the device"))
            floor = floor or (speed, round(peak / 2**20))


def measure(bench: Bench, options: Mapping[str, Any] | None) -> tuple[float, int]:
    """Return (tokens per second, peak bytes) of a few updates, after two updates to warm up."""
    sizes, batch, num_updates = bench.choose((MEDIUM, 8, 6), (SMALL, 16, 3), (SMALLEST, 2, 2))
    accelerator = make_accelerator("headway", bench, mixed_precision="no" if bench.is_cpu else "bf16")
    model = build_gpt2(bench, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if options is not None:
        accelerator.checkpoint_activations(model, **options)
    tokens = make_tokens(sizes, batch).to(bench.device)

    def run_updates(count: int) -> None:
        for _ in range(count):
            accelerator.backward(compute_loss(model, (tokens,)))
            optimizer.step()
            optimizer.zero_grad()

    run_updates(2)
    peak = bench.measure_peak(lambda: run_updates(1))
    speed = tokens.numel() * num_updates / bench.measure_seconds(lambda: run_updates(num_updates))
    accelerator.free_memory()
    return speed, peak
