"""What a checkpoint of 400 MB costs: the loop's standstill, until it is durable, loading, memory; and a late resume."""

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import HAS_ACCELERATE, added, num_repeats, save, summary

WIDTH, NUM_LAYERS = 2041, 8  # 33.3 million parameters: 133 MB, and twice that in Adam
LATE = 1_900_000

Job = tuple[Callable[[], Any], Callable[[], Any]]
"""(what is timed, what is done afterwards)."""


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose training state is 400 MB, after one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    return model, torch.optim.Adam(model.parameters(), 1e-4)


def prepared(library: str, folder: Path) -> tuple[Any, Any, Any]:
    """(accelerator, model, optimizer) of `library`, after one step."""
    module = __import__(library)
    project = __import__(f"{library}.utils", fromlist=["ProjectConfiguration"]) if library == "accelerate" else module
    configuration = project.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = module.Accelerator(cpu=True, project_config=configuration)
    model, optimizer = accelerator.prepare(*build())
    accelerator.backward(model(torch.ones(1, WIDTH)).mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def state_of(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Every tensor of the state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [t for state in inner.state_dict()["state"].values() for t in state.values() if isinstance(t, torch.Tensor)]
    return [p.detach() for p in model.parameters()] + kept


def write_raw(tensors: list[torch.Tensor], path: Path) -> None:
    """The same bytes into one file, forced to the disk."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(memoryview(tensor.contiguous().reshape(-1).numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_raw(tensors: list[torch.Tensor], path: Path) -> None:
    """And back."""
    with path.open("rb") as file:
        for tensor in tensors:
            file.readinto(memoryview(tensor.reshape(-1).numpy()).cast("B"))


def force(folder: Path) -> None:
    """Force what Accelerate has left to the kernel to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def nothing() -> None:
    """Nothing is left to do."""


def jobs(folder: Path) -> dict[str, Job]:
    """What is measured, in groups that begin with their floor."""
    ours, model, optimizer = prepared("headway", folder / "ours")
    tensors = state_of(model, optimizer)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    raw = folder / "raw"

    def copy() -> None:
        for target, source in zip(copies, tensors):
            target.copy_(source)

    found: dict[str, Job] = {
        "standstill: copy the state in memory": (copy, nothing),
        "standstill: copy it, again (A/A)": (copy, nothing),
        "standstill: headway, blocking=False": (lambda: ours.save_state(blocking=False), ours.wait_for_save),
        "durable: write the bytes and fsync": (lambda: write_raw(tensors, raw), nothing),
        "durable: headway save_state": (ours.save_state, nothing),
        "load: read the bytes": (lambda: read_raw(copies, raw), nothing),
        "load: headway load_state": (ours.load_state, nothing),
    }
    if HAS_ACCELERATE:
        peer, _, _ = prepared("accelerate", folder / "peer")

        def saved_and_forced() -> None:
            peer.save_state()
            force(folder / "peer")

        found |= {
            "standstill: accelerate save_state": (peer.save_state, nothing),
            "durable: accelerate save_state and fsync": (saved_and_forced, nothing),
            "load: accelerate load_state": (peer.load_state, nothing),
        }
    return found


def measure(found: dict[str, Job], repeats: int) -> dict[str, Any]:
    """Rows in milliseconds, by groups."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for name, (run, afterwards) in found.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if repeat:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            afterwards()
    rows = {}
    for name, spent in times.items():
        floor = next(other for other in times if other.split(":")[0] == name.split(":")[0])
        walls, cpus = zip(*spent)
        floor_walls, floor_cpus = zip(*times[floor])
        rows[name] = {
            "wall": summary(list(walls), 1e3), "cpu": summary(list(cpus), 1e3),
            "added wall": added(list(walls), list(floor_walls), 1e3), "added cpu": added(list(cpus), list(floor_cpus), 1e3),
        }  # fmt: skip
    return rows


# ---------------------------------------------------------------- memory and late resumes, in processes of their own


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def get_peak(run: Callable[[], Any]) -> int:
    """The most anonymous bytes that `run` adds, looked at every 2 ms."""
    before, highest, is_over = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not is_over.wait(0.002):
            highest = max(highest, anonymous_bytes() - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    run()
    is_over.set()
    watcher.join()
    return highest


def memory(library: str, way: str) -> int:
    """The most bytes that a second save (or a load) adds."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        accelerator, _, _ = prepared(library, Path(name))
        accelerator.save_state()
        gc.collect()
        if way == "load":
            return get_peak(accelerator.load_state)
        if way == "behind":
            return get_peak(lambda: (accelerator.save_state(blocking=False), accelerator.wait_for_save()))
        return get_peak(accelerator.save_state)


class Numbers(Dataset[int]):
    """8 million samples without content."""

    def __len__(self) -> int:
        return 8_000_000

    def __getitem__(self, index: int) -> int:
        return index


def late(library: str) -> float:
    """Seconds to the first batch after 1,900,000, shuffled, in batches of 4."""
    module = __import__(library)
    accelerator = module.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True))
    next(iter(loader))
    start = time.perf_counter()
    next(iter(accelerator.skip_first_batches(loader, LATE)))
    return time.perf_counter() - start


def apart(call: str) -> float:
    """A call of this file's in a process of its own."""
    code = f"import logging; logging.disable(30); from benchmarks.checkpoint.measure import *; print({call})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and save."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(jobs(Path(name)), num_repeats(9))
        shutil.rmtree(name, ignore_errors=True)
        os.mkdir(name)
    libraries = ["headway", *(["accelerate"] if HAS_ACCELERATE else [])]
    mib = {f"{library}, {way}": round(apart(f"memory({library!r}, {way!r})") / 2**20, 1)
           for library in libraries for way in ("save", "behind", "load") if (library, way) != ("accelerate", "behind")}  # fmt: skip
    seconds = {library: round(apart(f"late({library!r})"), 3) for library in libraries}
    save("checkpoint", "ms", rows, note=f"MiB added at the peak: {json.dumps(mib)}; seconds to the first batch after "
         f"{LATE:,} of a shuffled epoch: {json.dumps(seconds)}")  # fmt: skip


if __name__ == "__main__":
    main()
