"""Background saves of GPT-2 XL with AdamW: stall of the loop and time until all is written, compared with dcp.async_save.

`python -m benchmarks.gpu saves` runs only this step; with `--device cpu`, at a small size.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.gpu.bench import Bench, Row, get_scratch_folder
from benchmarks.gpu.training import SMALL, SMALLEST, XL, build_gpt2, compute_loss, make_accelerator, make_tokens
from headway.common.text import format_bytes

Save = Callable[[Path], Callable[[], Any]]
"""Starts a save into a folder, and returns a function that waits for its end."""


def run(bench: Bench) -> None:
    """Save one prepared model with both libraries in turn, twice each. Only the first save of each allocates buffers."""
    sizes = bench.choose(XL, SMALL, SMALLEST)
    accelerator = make_accelerator("headway", bench, mixed_precision="no" if bench.is_cpu else "bf16")
    model = build_gpt2(bench, sizes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = make_tokens(sizes, bench.choose(2, 4, 2)).to(bench.device)

    def update() -> None:
        accelerator.backward(compute_loss(model, (tokens,)))
        optimizer.step()
        optimizer.zero_grad()

    update()
    state = [t for state in optimizer.optimizer.state.values() for t in state.values()]
    num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *state])
    update_seconds = bench.measure_seconds(lambda: [update() for _ in range(4)]) / 4
    bench.print_line(f"  {format_bytes(num_bytes)} of weights and state; an update takes {update_seconds * 1e3:.0f} ms")
    measure_copy(bench, [*model.parameters(), *state])

    def save_with_headway(folder: Path) -> Callable[[], Any]:
        accelerator.save_state(folder, blocking=False)
        return lambda: accelerator.wait_for_save()

    def save_with_torch(folder: Path) -> Callable[[], Any]:
        weights, moments = get_state_dict(model, optimizer.optimizer)
        saving = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        return getattr(saving, "upload_completion", saving).result

    for number in (1, 2):
        for name, save in (("headway", save_with_headway), ("dcp.async_save", save_with_torch)):
            with bench.attempt(f"{name}, save {number}"):
                measure_save(bench, f"{name}, save {number}", save, update, update_seconds, num_bytes)


def measure_copy(bench: Bench, tensors: list[torch.Tensor]) -> None:
    """Add the floor of a stall: the time to copy the same bytes once into host memory that is already allocated."""
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    target = torch.empty(largest.shape, dtype=largest.dtype, pin_memory=not bench.is_cpu)
    source = largest.detach()
    target.copy_(source)
    rate = source.nbytes / bench.measure_seconds(lambda: target.copy_(source, non_blocking=True))
    seconds = sum(tensor.nbytes for tensor in tensors) / rate
    bench.add_row(
        Row(
            "copying the same bytes to host memory",
            seconds,
            "s",
            note=f"computed from the largest tensor, {rate / 1e9:.1f} GB/s",
        )
    )


def measure_save(
    bench: Bench, name: str, save: Save, update: Callable[[], None], update_seconds: float, num_bytes: int
) -> None:
    """Run one save, and add rows for the stall, an update during the save, and the time until the files are on the disk.

    Args:
        bench: Run of the step.
        name: Name of the save.
        save: Function that starts the save.
        update: Function that runs one update.
        update_seconds: Seconds of an update without a save.
        num_bytes: Size of the training state.
    """
    folder = get_scratch_folder() / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < 1.1 * num_bytes:
        bench.add_row(
            Row(
                name,
                note=f"left out: it needs {format_bytes(num_bytes)} of disk space, and {format_bytes(free)} are free",
            )
        )
        return
    start = perf_counter()
    waits: list[Callable[[], Any]] = []
    stall = bench.measure_seconds(lambda: waits.append(save(folder)))
    during = bench.measure_seconds(lambda: [update() for _ in range(4)]) / 4
    waits[0]()
    duration = perf_counter() - start
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    bench.add_row(Row(f"{name}: stall of the loop", stall, "s"))
    bench.add_row(Row(f"{name}: an update during the save", during * 1e3, "ms", update_seconds * 1e3, "without a save"))
    bench.add_row(
        Row(
            f"{name}: time until written",
            duration,
            "s",
            note=f"{format_bytes(size)} in files, {format_bytes(int(size / duration))}/s",
        )
    )
    shutil.rmtree(folder)
