"""Cost of a checkpoint of 400 MB: stall of the loop, time until durable, load time, memory, and a resume late in an epoch.

`python benchmarks/run.py checkpoint` runs it, and rewrites the table in benchmarks/README.md.
"""

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

from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, save_result, summarize, summarize_added

WIDTH, NUM_LAYERS = 2041, 8  # 33.3 million parameters: 133 MB, and twice that in Adam
LATE = 1_900_000

Job = tuple[Callable[[], Any], Callable[[], Any]]
"""(function that is timed, function that runs afterwards, outside of the time)."""


def build_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build a model and an Adam optimizer whose training state is 400 MB after the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    return model, torch.optim.Adam(model.parameters(), 1e-4)


def prepare(library: str, folder: Path) -> tuple[Any, Any, Any]:
    """Return (accelerator, model, optimizer) of `library` after one step."""
    module = __import__(library)
    project = __import__(f"{library}.utils", fromlist=["ProjectConfiguration"]) if library == "accelerate" else module
    configuration = project.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = module.Accelerator(cpu=True, project_config=configuration)
    model, optimizer = accelerator.prepare(*build_model())
    accelerator.backward(model(torch.ones(1, WIDTH)).mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def list_state(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return every tensor of the training state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    moments = [
        t for state in inner.state_dict()["state"].values() for t in state.values() if isinstance(t, torch.Tensor)
    ]
    return [p.detach() for p in model.parameters()] + moments


def write_raw(tensors: list[torch.Tensor], path: Path) -> None:
    """Write the bytes of all tensors into one file, and force it to the disk."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(memoryview(tensor.contiguous().reshape(-1).numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_raw(tensors: list[torch.Tensor], path: Path) -> None:
    """Read the bytes that `write_raw` wrote back into the tensors."""
    with path.open("rb") as file:
        for tensor in tensors:
            file.readinto(memoryview(tensor.reshape(-1).numpy()).cast("B"))


def force_to_disk(folder: Path) -> None:
    """Force all files below a folder to the disk; Accelerate leaves that to the kernel."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def do_nothing() -> None:
    """Do nothing, for jobs without a second part."""


def list_jobs(folder: Path) -> dict[str, Job]:
    """Return the jobs by name. The part before the colon is the group, and the first job of a group is its floor."""
    ours, model, optimizer = prepare("headway", folder / "ours")
    tensors = list_state(model, optimizer)
    copies = [torch.empty_like(tensor) for tensor in tensors]
    raw = folder / "raw"

    def copy() -> None:
        for target, source in zip(copies, tensors):
            target.copy_(source)

    jobs: dict[str, Job] = {
        "stall of the loop: copy the state in memory": (copy, do_nothing),
        "stall of the loop: copy the state, again (A/A)": (copy, do_nothing),
        "stall of the loop: headway, blocking=False": (lambda: ours.save_state(blocking=False), ours.wait_for_save),
        "durable: write the bytes and fsync": (lambda: write_raw(tensors, raw), do_nothing),
        "durable: headway save_state": (ours.save_state, do_nothing),
        "load: read the bytes": (lambda: read_raw(copies, raw), do_nothing),
        "load: headway load_state": (ours.load_state, do_nothing),
    }
    if HAS_ACCELERATE:
        theirs, _, _ = prepare("accelerate", folder / "peer")

        def save_and_force() -> None:
            theirs.save_state()
            force_to_disk(folder / "peer")

        jobs |= {
            "stall of the loop: accelerate save_state": (theirs.save_state, do_nothing),
            "durable: accelerate save_state and fsync": (save_and_force, do_nothing),
            "load: accelerate load_state": (theirs.load_state, do_nothing),
        }
    return jobs


def measure(jobs: dict[str, Job], repeats: int) -> dict[str, Any]:
    """Time all jobs in turn, and return rows in milliseconds, each compared with the floor of its group."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for name, (run, afterwards) in jobs.items():
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
            "wall": summarize(list(walls), 1e3), "cpu": summarize(list(cpus), 1e3),
            "added wall": summarize_added(list(walls), list(floor_walls), 1e3),
            "added cpu": summarize_added(list(cpus), list(floor_cpus), 1e3),
        }  # fmt: skip
    return rows


# ---------------------------------------------------------------- memory and late resumes, in separate processes


def get_anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measure_peak(run: Callable[[], Any]) -> int:
    """Return the most anonymous bytes that `run` adds, sampled every 2 ms."""
    before, highest, has_ended = get_anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal highest
        while not has_ended.wait(0.002):
            highest = max(highest, get_anonymous_bytes() - before)

    watcher = threading.Thread(target=sample)
    watcher.start()
    run()
    has_ended.set()
    watcher.join()
    return highest


def measure_memory(library: str, action: str) -> int:
    """Return the most bytes that the second save adds ("save", "background save"), or a load ("load")."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        accelerator, _, _ = prepare(library, Path(name))
        accelerator.save_state()
        gc.collect()
        if action == "load":
            return measure_peak(accelerator.load_state)
        if action == "background save":
            return measure_peak(lambda: (accelerator.save_state(blocking=False), accelerator.wait_for_save()))
        return measure_peak(accelerator.save_state)


class Numbers(Dataset[int]):
    """Dataset of 8 million indices."""

    def __len__(self) -> int:
        return 8_000_000

    def __getitem__(self, index: int) -> int:
        return index


def time_late_resume(library: str) -> float:
    """Return the seconds to the first batch after 1,900,000 batches of 4 shuffled samples were skipped."""
    module = __import__(library)
    accelerator = module.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True))
    next(iter(loader))
    start = time.perf_counter()
    next(iter(accelerator.skip_first_batches(loader, LATE)))
    return time.perf_counter() - start


def run_in_new_process(call: str) -> float:
    """Evaluate a call of a function of this file in a separate process, and return its result."""
    code = f"import logging; logging.disable(30); from benchmarks.checkpoint.measure import *; print({call})"
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(finished.stdout.split()[-1])


def main() -> None:
    """Measure all variants in turn and write result.json."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(list_jobs(Path(name)), get_num_repeats(9))
        shutil.rmtree(name, ignore_errors=True)
        os.mkdir(name)
    libraries = ["headway", *(["accelerate"] if HAS_ACCELERATE else [])]
    cases = [(library, action) for library in libraries for action in ("save", "background save", "load")]
    cases = [case for case in cases if case != ("accelerate", "background save")]  # Accelerate has none
    mib = {f"{library}, {action}": round(run_in_new_process(f"measure_memory({library!r}, {action!r})") / 2**20, 1)
           for library, action in cases}  # fmt: skip
    seconds = {library: round(run_in_new_process(f"time_late_resume({library!r})"), 3) for library in libraries}
    save_result("checkpoint", "ms", rows, note=f"MiB added at the peak: {json.dumps(mib)}; seconds to the first batch after "
         f"{LATE:,} of a shuffled epoch: {json.dumps(seconds)}")  # fmt: skip


if __name__ == "__main__":
    main()
