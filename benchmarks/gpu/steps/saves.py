"""Saves behind the loop, GPT-2 XL with AdamW: how long the loop stands still, and until all is written, beside dcp.async_save."""

import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.gpu.bench import Bench, Row, scratch
from benchmarks.gpu.training import SMALL, SMALLEST, XL, accelerator_of, gpt2, loss_of, tokens_of
from headway.common.text import format_bytes

Save = Callable[[Path], Callable[[], Any]]
"""Begins a save into a folder; returns what waits for its end."""


def run(bench: Bench) -> None:
    """One prepared model, saved by both in turn; each save's first time makes its buffers, the second is told beside it."""
    sizes = bench.choose(XL, SMALL, SMALLEST)
    accelerator = accelerator_of("headway", bench, mixed_precision="no" if bench.is_cpu else "bf16")
    model = gpt2(bench, sizes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = tokens_of(sizes, bench.choose(2, 4, 2)).to(bench.device)

    def update() -> None:
        accelerator.backward(loss_of(model, (tokens,)))
        optimizer.step()
        optimizer.zero_grad()

    update()
    state = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *state])
    pace = bench.seconds(lambda: [update() for _ in range(4)]) / 4
    bench.say(f"  {format_bytes(num_bytes)} of weights and state; an update takes {pace * 1e3:.0f} ms")
    copying(bench, [*model.parameters(), *state])

    def ours(folder: Path) -> Callable[[], Any]:
        accelerator.save_state(folder, blocking=False)
        return lambda: accelerator.wait_for_save()

    def theirs(folder: Path) -> Callable[[], Any]:
        weights, moments = get_state_dict(model, optimizer.optimizer)
        saving = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        return getattr(saving, "upload_completion", saving).result

    for number in (1, 2):
        for name, save in (("headway", ours), ("dcp.async_save", theirs)):
            with bench.attempt(f"{name}, save {number}"):
                one(bench, f"{name}, save {number}", save, update, pace, num_bytes)


def copying(bench: Bench, tensors: list[torch.Tensor]) -> None:
    """The floor of a standstill: the same bytes copied once into memory that is there already."""
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    target = torch.empty(largest.shape, dtype=largest.dtype, pin_memory=not bench.is_cpu)
    source = largest.detach()
    target.copy_(source)
    rate = source.nbytes / bench.seconds(lambda: target.copy_(source, non_blocking=True))
    seconds = sum(tensor.nbytes for tensor in tensors) / rate
    bench.row(
        Row(
            "copying that many bytes to host memory",
            seconds,
            "s",
            note=f"from {rate / 1e9:.1f} GB/s of the largest tensor",
        )
    )


def one(bench: Bench, what: str, save: Save, update: Callable[[], None], pace: float, num_bytes: int) -> None:
    """One save: the standstill, updates until it is on the disk, and how slow these are."""
    folder = scratch() / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < 1.1 * num_bytes:
        bench.row(
            Row(what, note=f"left out: it needs {format_bytes(num_bytes)} of disk, and {format_bytes(free)} are free")
        )
        return
    begun = perf_counter()
    waiting: list[Callable[[], Any]] = []
    still = bench.seconds(lambda: waiting.append(save(folder)))
    during = bench.seconds(lambda: [update() for _ in range(4)]) / 4
    waiting[0]()
    whole = perf_counter() - begun
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    bench.row(Row(f"{what}: the loop stands still", still, "s"))
    bench.row(Row(f"{what}: an update meanwhile", during * 1e3, "ms", pace * 1e3, "undisturbed"))
    bench.row(
        Row(
            f"{what}: until it is written",
            whole,
            "s",
            note=f"{format_bytes(size)} in files, {format_bytes(int(size / whole))}/s",
        )
    )
    shutil.rmtree(folder)
