"""How close do saves and loads come to the disk? The floors do the same work by hand, in the same run.

`python -m benchmarks.disk.measure [repeats] [GB...]`. Sizes that the folder's disk cannot hold six times are left out.

A floor keeps only the promises in its name, such as fsync, new tensors for the optimizer's state, hashes that are compared
before a weight changes, or one file that is read back before a rename puts it in place. Before a cold load, the files are
removed from the page cache.
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
import xxhash

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved

LAYER = 2041  # 16.7 MB of weights, and twice that in Adam's state
STREAMS = 4
SIZES = (0.2, 0.7, 1.5)
"""Sizes of the training state in GB."""
Times = Sequence[tuple[float, float]]
"""(wall, CPU) seconds of each repeat."""
Passes = dict[str, Callable[[], Any]]


def prepare(library: str, num_bytes: float, folder: Path, is_cpu: bool = True) -> tuple[Any, Any, Any]:
    """Return (accelerator, model, optimizer) of a library after one step, with a training state of `num_bytes`."""
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
    """Return the memory of the weights and the memory of the optimizer's state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return [make_view(parameter) for parameter in model.parameters()], [make_view(tensor) for tensor in tensors]


def make_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU, or of a copy on the host."""
    return memoryview(tensor.detach().cpu().reshape(-1).numpy()).cast("B")


def divide_bytes(views: Sequence[memoryview], num_streams: int) -> list[list[memoryview]]:
    """Divide the bytes into one consecutive list per stream, of about the same size. Tensors are cut at megabytes."""
    pieces = [view[start : start + 2**20] for view in views for start in range(0, len(view), 2**20)]
    return [
        pieces[len(pieces) * index // num_streams : len(pieces) * (index + 1) // num_streams]
        for index in range(num_streams)
    ]


def run_streams(act: Callable[[int], None], num_streams: int) -> None:
    """Run `act` in one thread per stream."""
    threads = [threading.Thread(target=act, args=(index,)) for index in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_floor(views: Sequence[memoryview], folder: Path, num_streams: int, is_forced: bool = True) -> None:
    """Write the bytes to one new file per stream, and only then remove the former files.

    Args:
        views: Memory to write.
        folder: Folder of the files.
        num_streams: Number of files, each written by a thread.
        is_forced: Whether to force each file to the disk.
    """
    former = folder.with_suffix(".former")
    if folder.exists():
        folder.rename(former)
    folder.mkdir()
    parts = divide_bytes(views, num_streams)

    def write(index: int) -> None:
        with open(folder / str(index), "wb", buffering=0) as file:
            for piece in parts[index]:
                file.write(piece)
            if is_forced:
                os.fsync(file.fileno())

    run_streams(write, num_streams)
    shutil.rmtree(former, ignore_errors=True)


def read_floor(
    views: Sequence[memoryview], folder: Path, num_streams: int, is_kept: bool = True, is_hashed: bool = False
) -> list[str]:
    """Read the bytes that `write_floor` wrote with as many streams, and return the hash of each stream.

    Args:
        views: Memory of the tensors.
        folder: Folder that `write_floor` wrote.
        num_streams: Number of threads, each of which reads one file.
        is_kept: Whether to read into the memory of the tensors. False: each thread reuses one block. Default: True.
        is_hashed: Whether to hash the bytes. Default: False, the hashes are those of no bytes.
    """
    parts, hashes = divide_bytes(views, num_streams), [""] * num_streams

    def read(index: int) -> None:
        digest, block = xxhash.xxh3_128(), memoryview(bytearray(2**20))
        with open(folder / str(index), "rb", buffering=0) as file:
            for piece in parts[index]:
                target = piece if is_kept else block[: len(piece)]
                file.readinto(target)
                if is_hashed:
                    digest.update(target)
        hashes[index] = digest.hexdigest()

    run_streams(read, num_streams)
    return hashes


def load_floor(
    weights: Sequence[memoryview], state: Sequence[torch.Tensor], folder: Path, hashes: Sequence[str] = ()
) -> list[str]:
    """Read the optimizer's state into new tensors, and the weights into the parameters.

    If hashes are given, all bytes are compared with them before a parameter changes, so the weights are read twice.

    Args:
        weights: Memory of the parameters.
        state: Tensors of the optimizer's state, which are not changed.
        folder: Folder with one folder of streams for the weights and one for the state.
        hashes: Hashes that an earlier call has returned. Default: (), nothing is compared.
    """
    found = read_floor(weights, folder / "weights", STREAMS, is_kept=False, is_hashed=True) if hashes else []
    made = [make_view(torch.empty_like(tensor)) for tensor in state]
    found += read_floor(made, folder / "state", STREAMS, is_hashed=bool(hashes))
    if list(hashes) != (found if hashes else []):
        raise RuntimeError("other bytes were read than were written")
    read_floor(weights, folder / "weights", STREAMS)
    return found


def replace_floor(views: Sequence[memoryview], path: Path, is_compared: bool) -> None:
    """Write one file and rename it to its name, without fsync.

    Args:
        views: Memory of the tensors.
        path: File to create or replace.
        is_compared: Whether to hash the bytes, and to read the file back and compare its hash before the rename.
    """
    written, read, made = xxhash.xxh3_128(), xxhash.xxh3_128(), path.with_suffix(".tmp")
    with open(made, "wb", buffering=0) as file:
        for piece in divide_bytes(views, 1)[0]:
            file.write(piece)
            if is_compared:
                written.update(piece)
    if is_compared:
        block = memoryview(bytearray(2**20))
        with open(made, "rb", buffering=0) as file:
            while count := file.readinto(block):
                read.update(block[:count])
        if read.digest() != written.digest():
            raise RuntimeError("other bytes were read than were written")
    made.replace(path)


def evict_from_page_cache(folder: Path) -> None:
    """Remove the files below a folder from the page cache. They must have been forced to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def force_to_disk(folder: Path) -> None:
    """Force all files below a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def list_passes(folder: Path, num_bytes: float) -> dict[str, Passes]:
    """Return the passes by group. Within a group, the floors come first."""
    headway_accelerator, model, optimizer = prepare("headway", num_bytes, folder / "ours")
    weights, _ = list_bytes(model, optimizer)
    tensors = [each for one in optimizer.optimizer.state.values() for each in one.values() if each.ndim]
    all_views, raw, read = [*weights, *map(make_view, tensors)], folder / "raw", folder / "read"
    read.mkdir()
    write_floor(weights, read / "weights", STREAMS)
    write_floor([make_view(tensor) for tensor in tensors], read / "state", STREAMS)
    hashes = read_floor(weights, read / "weights", STREAMS, False, True)
    hashes += read_floor([make_view(tensor) for tensor in tensors], read / "state", STREAMS, False, True)
    loads: Passes = {
        "floor, new tensors for the optimizer": lambda: load_floor(weights, tensors, read),
        "floor, and hashes compared first": lambda: load_floor(weights, tensors, read, hashes),
        "floor, all into tensors that exist": lambda: [
            read_floor(weights, read / "weights", STREAMS),
            read_floor([make_view(tensor) for tensor in tensors], read / "state", STREAMS),
        ],
        "headway load_state": headway_accelerator.load_state,
    }
    groups: dict[str, Passes] = {
        "save": {
            "floor, 4 streams and fsync": lambda: write_floor(all_views, raw, STREAMS),
            "floor, 1 stream and fsync": lambda: write_floor(all_views, raw, 1),
            "headway save_state": headway_accelerator.save_state,
        },
        "load": loads,
        "load, cold": loads,
        "save_model": {
            "floor, one file and a rename": lambda: replace_floor(weights, folder / "raw.safetensors", False),
            "floor, and read back": lambda: replace_floor(weights, folder / "raw.safetensors", True),
            "floor, 4 files": lambda: write_floor(weights, raw, STREAMS, False),
            "headway save_model": lambda: headway_accelerator.save_model(model, folder / "weights"),
        },
    }
    if HAS_ACCELERATE:
        theirs, their_model, _ = prepare("accelerate", num_bytes, folder / "peer")

        def save_and_force() -> None:
            theirs.save_state()
            force_to_disk(folder / "peer")

        groups["save"] |= {
            "accelerate save_state, no fsync": theirs.save_state,
            "accelerate save_state and fsync": save_and_force,
        }
        loads["accelerate load_state"] = theirs.load_state
        groups["save_model"]["accelerate save_model"] = lambda: theirs.save_model(their_model, folder / "their_weights")
    return groups


def measure(folder: Path, num_gb: float, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Return the rows of one size, and a line for each pass that is not a floor: its pace beside each floor."""
    rows, lines = {}, []

    def forget() -> None:
        os.sync()
        evict_from_page_cache(folder)

    for group, passes in list_passes(folder, num_gb * 1e9).items():
        # Bytes that a pass has not forced to the disk would slow the next one down.
        found = time_interleaved(passes, repeats, before=forget if group == "load, cold" else os.sync)
        rows |= make_rows({f"{num_gb:g} GB, {group}: {name}": times for name, times in found.items()}, 1.0)
        floors = [name for name in found if name.startswith("floor")]
        for name in found.keys() - set(floors):
            paces = ", ".join(f"{_compare(found[floor], found[name])} ({floor})" for floor in floors)
            lines.append(f"{num_gb:g} GB, {group}, {name}: {paces}")
    return rows, sorted(lines)


def _compare(floor: Times, times: Times) -> str:
    """Return the pace as a multiple of a floor's, by wall time and by CPU time: medians of repeats side by side."""
    wall, cpu = (statistics.median(base[at] / time[at] for base, time in zip(floor, times)) for at in (0, 1))
    return f"{wall:.2f}/{cpu:.2f}"


def main() -> None:
    """Measure each size and save."""
    logging.disable(logging.WARNING)
    repeats, sizes = get_num_repeats(7), [float(word) for word in sys.argv[2:]] or SIZES
    rows: dict[str, Any] = {}
    lines: list[str] = []
    for num_gb in sizes:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
            if shutil.disk_usage(name).free < 6e9 * num_gb:
                continue
            found = measure(Path(name), num_gb, repeats)
            rows, lines = rows | found[0], lines + found[1]
        gc.collect()
    heading = "Pace as a multiple of each floor's, by wall time/CPU time, median of repeats side by side"
    save_result(
        "disk", "s", rows, note=f"{heading}: {'; '.join(lines)}"
    )  # again after each size, in case a later one is stopped


if __name__ == "__main__":
    main()
