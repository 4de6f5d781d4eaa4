"""How close do saves and loads come to the disk? The floors write and read the same bytes in plain Python, in the same run.

`python benchmarks/run.py disk [repeats] [GB...]`. Sizes that the folder's disk or the memory cannot hold four times are left out.
"""

import gc
import logging
import os
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import HAS_ACCELERATE, interleave, num_repeats, rows_of, save

LAYER = 2041  # 16.7 MB of weights, and twice that in Adam
STREAMS = 4
SIZES = (0.2, 0.7, 1.5)
"""Training states in GB."""


def prepare(library: str, num_bytes: float, folder: Path, is_cpu: bool = True) -> tuple[Any, Any, Any]:
    """Return (accelerator, model, optimizer) of a library after one step, with a state of that size."""
    torch.manual_seed(0)
    num_layers = max(1, round(num_bytes / (3 * 4 * LAYER * (LAYER + 1))))
    model = torch.nn.Sequential(*(torch.nn.Linear(LAYER, LAYER) for _ in range(num_layers)))
    module = __import__(library)
    project = __import__(f"{library}.utils", fromlist=["ProjectConfiguration"]) if library == "accelerate" else module
    configuration = project.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = module.Accelerator(cpu=is_cpu or None, project_config=configuration)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-4))
    accelerator.backward(model(torch.ones(1, LAYER, device=accelerator.device)).mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def list_bytes(model: torch.nn.Module, optimizer: Any) -> tuple[list[memoryview], list[memoryview]]:
    """Return the memory of the weights and of the optimizer's state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    state = [t for each in inner.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
    return [view_of(parameter) for parameter in model.parameters()], [view_of(tensor) for tensor in state]


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's memory, or that of a copy on the host."""
    return memoryview(tensor.detach().cpu().reshape(-1).numpy()).cast("B")


def deal(views: Sequence[memoryview], num_streams: int) -> list[list[memoryview]]:
    """Divide the bytes into consecutive parts of about the same size, with tensors cut at megabytes."""
    pieces = [view[start : start + 2**20] for view in views for start in range(0, len(view), 2**20)]
    return [
        pieces[len(pieces) * index // num_streams : len(pieces) * (index + 1) // num_streams]
        for index in range(num_streams)
    ]


def run_streams(act: Callable[[int], None], num_streams: int) -> None:
    """Run one thread per stream."""
    threads = [threading.Thread(target=act, args=(index,)) for index in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_floor(views: Sequence[memoryview], folder: Path, num_streams: int, is_forced: bool = True) -> None:
    """Write the bytes to one new file per stream, force each to the disk, and only then remove the former files."""
    former = folder.with_suffix(".former")
    if folder.exists():
        folder.rename(former)
    folder.mkdir()
    parts = deal(views, num_streams)

    def write(index: int) -> None:
        with open(folder / str(index), "wb", buffering=0) as file:
            for piece in parts[index]:
                file.write(piece)
            if is_forced:
                os.fsync(file.fileno())

    run_streams(write, num_streams)
    shutil.rmtree(former, ignore_errors=True)


def read_floor(views: Sequence[memoryview], folder: Path, num_streams: int) -> None:
    """Read the bytes that `write_floor` wrote with as many streams into the same memory."""
    parts = deal(views, num_streams)

    def read(index: int) -> None:
        with open(folder / str(index), "rb", buffering=0) as file:
            for piece in parts[index]:
                file.readinto(piece)

    run_streams(read, num_streams)


def force(folder: Path) -> None:
    """Force all files below a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def list_passes(folder: Path, num_bytes: float) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the passes by group. The first of each group is the floor that the others are compared with."""
    ours, model, optimizer = prepare("headway", num_bytes, folder / "ours")
    weights, state = list_bytes(model, optimizer)
    every, raw = [*weights, *state], folder / "raw"
    groups: dict[str, dict[str, Callable[[], Any]]] = {
        "save": {
            "floor, 4 streams and fsync": lambda: write_floor(every, raw, STREAMS),
            "floor, 1 stream and fsync": lambda: write_floor(every, raw, 1),
            "headway save_state": ours.save_state,
        },
        "load": {
            "floor, 4 streams": lambda: read_floor(every, folder / "read", STREAMS),
            "headway load_state": ours.load_state,
        },
        "save_model": {
            "floor, 4 streams, no fsync": lambda: write_floor(weights, raw, STREAMS, False),
            "headway save_model": lambda: ours.save_model(model, folder / "weights"),
        },
    }
    write_floor(every, folder / "read", STREAMS)
    if HAS_ACCELERATE:
        peer, their_model, _ = prepare("accelerate", num_bytes, folder / "peer")

        def save_and_force() -> None:
            peer.save_state()
            force(folder / "peer")

        groups["save"] |= {
            "accelerate save_state, no fsync": peer.save_state,
            "accelerate save_state and fsync": save_and_force,
        }
        groups["load"]["accelerate load_state"] = peer.load_state
        groups["save_model"]["accelerate save_model"] = lambda: peer.save_model(their_model, folder / "their_weights")
    return groups


def measure(folder: Path, num_gb: float, repeats: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the rows of one size, and each pass's pace as a multiple of its floor's: the median of pairs in turn."""
    rows, paces = {}, {}
    for group, passes in list_passes(folder, num_gb * 1e9).items():
        found = interleave({f"{num_gb:g} GB, {group}: {name}": act for name, act in passes.items()}, repeats)
        rows |= rows_of(found, 1.0)
        floor = next(iter(found.values()))
        for name, times in found.items():
            paces[name] = round(statistics.median(base[0] / time[0] for base, time in zip(floor, times)), 2)
        os.sync()
    return rows, paces


def main() -> None:
    """Measure and save."""
    logging.disable(logging.WARNING)
    repeats, sizes = num_repeats(7), [float(word) for word in sys.argv[2:]] or SIZES
    rows: dict[str, Any] = {}
    paces: dict[str, float] = {}
    for num_gb in sizes:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
            if shutil.disk_usage(name).free < 6e9 * num_gb:
                continue
            found = measure(Path(name), num_gb, repeats)
            rows, paces = rows | found[0], paces | found[1]
        gc.collect()
    told = "; ".join(f"{name}: {pace:g}" for name, pace in paces.items())
    save(
        "disk",
        "s",
        rows,
        note=f"Pace as a multiple of the first row of the group, median of repeats side by side: {told}",
    )


if __name__ == "__main__":
    main()
