"""Activations in host memory beside activations computed again: tokens a second and the peak of a GPT-2 of 355 million parameters."""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import MEDIUM, SMALL, SMALLEST, accelerator_of, gpt2, loss_of, tokens_of

VARIANTS: dict[str, Mapping[str, Any] | None] = {
    "all kept on the device": None,
    "computed again": {},
    "all kept in host memory": {"policy": "keep_all", "offload": True},
    "computed again, blocks' inputs in host memory": {"offload": True},
}


def run(bench: Bench) -> None:
    """Each variant with a model of its own; the first is what the others stand beside."""
    if bench.is_cpu:
        bench.say("  on a CPU nothing is offloaded: the rows with host memory show what stays of them")
    floor: tuple[float, float] | None = None
    for name, kind in VARIANTS.items():
        bench.release()
        with bench.attempt(name):
            speed, peak = measure(bench, kind)
            beside = (None, None) if floor is None else floor
            bench.row(Row(f"{name}: speed", speed, "tokens/s", beside[0], "all kept"))
            bench.row(Row(f"{name}: peak", round(peak / 2**20), "MiB", beside[1], "all kept"))
            floor = floor or (speed, round(peak / 2**20))


def measure(bench: Bench, kind: Mapping[str, Any] | None) -> tuple[float, int]:
    """(tokens a second, peak in bytes) of a few updates after two to warm up."""
    sizes, batch, num_updates = bench.choose((MEDIUM, 8, 6), (SMALL, 16, 3), (SMALLEST, 2, 2))
    accelerator = accelerator_of("headway", bench, mixed_precision="no" if bench.is_cpu else "bf16")
    model = gpt2(bench, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if kind is not None:
        accelerator.checkpoint_activations(model, **kind)
    tokens = tokens_of(sizes, batch).to(bench.device)

    def updates(count: int) -> None:
        for _ in range(count):
            accelerator.backward(loss_of(model, (tokens,)))
            optimizer.step()
            optimizer.zero_grad()

    updates(2)
    peak = bench.peak(lambda: updates(1))
    speed = tokens.numel() * num_updates / bench.seconds(lambda: updates(num_updates))
    accelerator.free_memory()
    return speed, peak
