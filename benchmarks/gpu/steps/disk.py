"""Blocking saves and loads of 5 GB on the device, compared with the same bytes in plain Python, and with Accelerate.

`python -m benchmarks.gpu disk` runs only this step; with `--device cpu`, at a small size.
"""

import gc
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.disk.measure import STREAMS, list_bytes, prepare, read_floor, write_floor
from benchmarks.gpu.bench import Bench, Row, get_scratch_folder
from benchmarks.timing import ACCELERATE_MISSING, HAS_ACCELERATE
from headway.common.text import format_bytes


def run(bench: Bench) -> None:
    """Run each variant twice in turn, and report the second run, which has files to replace."""
    num_bytes = bench.choose(5e9, 2e8, 2e7)
    folder = get_scratch_folder() / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if free < 5 * num_bytes:
        bench.add_row(
            Row(
                "saves and loads",
                note=f"left out: only {format_bytes(free)} of disk space are free",
            )
        )
        return
    try:
        _measure_all(bench, num_bytes, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_all(bench: Bench, num_bytes: float, folder: Path) -> None:
    ours, model, optimizer = prepare("headway", num_bytes, folder / "ours", bench.is_cpu)
    weights, state = list_bytes(model, optimizer)
    all_views = [*weights, *state]
    total = sum(len(view) for view in all_views)
    bench.print_line(f"  {format_bytes(total)} of weights and optimizer state")
    write_floor(all_views, folder / "read", STREAMS)
    passes: dict[str, Callable[[], Any]] = {
        "save: floor, 4 streams and fsync": lambda: write_floor(all_views, folder / "raw", STREAMS),
        "save: floor, 1 stream and fsync": lambda: write_floor(all_views, folder / "raw", 1),
        "save: headway save_state": ours.save_state,
        "load: floor, 4 streams": lambda: read_floor(all_views, folder / "read", STREAMS),
        "load: headway load_state": ours.load_state,
        "save_model: floor, 4 streams, no fsync": lambda: write_floor(weights, folder / "raw", STREAMS, False),
        "save_model: headway": partial(ours.save_model, model, folder / "weights"),
    }
    _measure(bench, passes, total, sum(map(len, weights)))
    del passes, ours, model, optimizer
    gc.collect()
    if not HAS_ACCELERATE:
        bench.add_row(Row("accelerate", note=ACCELERATE_MISSING))
        return
    with bench.attempt("accelerate"):
        theirs, their_model, _ = prepare("accelerate", num_bytes, folder / "peer", bench.is_cpu)
        passes = {
            "save: accelerate save_state, no fsync": theirs.save_state,
            "load: accelerate load_state": theirs.load_state,
            "save_model: accelerate": partial(theirs.save_model, their_model, folder / "their_weights"),
        }
        _measure(bench, passes, total, sum(map(len, weights)))


def _measure(bench: Bench, passes: dict[str, Callable[[], Any]], total: int, num_weight_bytes: int) -> None:
    """Add one row per variant, compared with the first one of its group if that is a floor."""
    seconds: dict[str, float] = {}
    for _ in range(2):
        for name, act in passes.items():
            seconds[name] = bench.measure_seconds(act)
    for name, duration in seconds.items():
        group = name.split(":")[0]
        floor = next(other for other in seconds if other.startswith(f"{group}:"))
        num_bytes = num_weight_bytes if group == "save_model" else total
        is_compared = floor != name and "floor" in floor
        bench.add_row(
            Row(
                name,
                num_bytes / duration / 1e9,
                "GB/s",
                num_bytes / seconds[floor] / 1e9 if is_compared else None,
                "floor" if is_compared else "",
                note=f"{duration:.2f} s, {torch.get_num_threads()} torch threads",
            )
        )
