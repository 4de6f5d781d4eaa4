"""Cost of recovery: a state of 100 MB kept in memory after each update, overlapped saves, and compiled code in checkpoints.

Each row is compared with the same updates without saves, on one rank and on two (gloo). Wall time suffers on a busy machine, so
the CPU time of the loop's thread (the loop's own cost) and of the whole process are measured, too.

`python benchmarks/run.py recovery` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile.measure import BATCH, GPT, LENGTH
from benchmarks.timing import find_command, get_children_cpu_seconds, get_num_repeats, save_result
from headway import Accelerator, ProjectConfiguration


def measure_on_ranks(count: int, folder: Path) -> dict[str, Any]:
    """Return the rows of a run on `count` ranks."""
    path = folder / f"rows{count}.json"
    words = ["-m", "benchmarks.recovery.worker", str(path), str(get_num_repeats(12))]
    command = (
        [sys.executable, *words]
        if count == 1
        else [find_command("headway"), "launch", "--cpu", "-n", str(count), *words]
    )
    subprocess.run(command, check=True, env={**os.environ, "BENCHMARK_RUN": str(folder / f"run{count}")})
    return {f"{count} rank{'s' * (count > 1)}: {name}": row for name, row in json.loads(path.read_text()).items()}


def time_first_update() -> None:
    """Time the first update of a compiled model in this process, and print (wall, CPU) seconds as JSON."""
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, keep_compiled=sys.argv[2] == "keep")
    accelerator = Accelerator(cpu=True, project_config=project, dynamo_backend="inductor")
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.resume("latest")
    wall, cpu = time.perf_counter(), time.process_time() + get_children_cpu_seconds()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.zeros(BATCH, LENGTH, dtype=torch.long)).square().mean())
        optimizer.step()
    sys.stdout.write(json.dumps([time.perf_counter() - wall, time.process_time() + get_children_cpu_seconds() - cpu]))
    accelerator.save_state()


def time_compiled_resumes(folder: Path) -> dict[str, tuple[float, float]]:
    """Return (wall, CPU) seconds of the first update: of a new run, and of resumed runs on a machine with empty caches."""
    rows = {}
    cases = (("new run", "keep"), ("resumed with keep_compiled", "keep"), ("resumed without keep_compiled", "drop"))
    for name, mode in cases:
        with tempfile.TemporaryDirectory() as cache:
            finished = subprocess.run(
                [sys.executable, "-m", "benchmarks.recovery.measure", "first", mode], cwd=folder, check=True, text=True,
                stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HEADWAY_HOME": str(folder),
                                             "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        rows[name] = tuple(json.loads(finished.stdout))
    return rows


def main() -> None:
    """Measure all variants in turn and write result.json."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        folder = Path(name)
        rows = {**measure_on_ranks(1, folder), **measure_on_ranks(2, folder)}
        compile_folder = folder / "compiled"
        compile_folder.mkdir()
        note = (
            "CPU: time of the loop's own thread. Added: by one save, or by one update kept in memory. First updates: "
        )
        note += "; ".join(
            f"{name} {cpu:.1f} s of CPU, {wall:.1f} s"
            for name, (wall, cpu) in time_compiled_resumes(compile_folder).items()
        )
    save_result("recovery", "ms", rows, note)


if __name__ == "__main__":
    time_first_update() if "first" in sys.argv[1:2] else main()
