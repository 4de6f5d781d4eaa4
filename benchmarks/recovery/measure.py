"""What recovery costs: a state of 100 MB kept in memory after each update, overlapped saves, and compiled code in checkpoints.

One rank and two (gloo), each row beside the same updates without it, in one run. Beside wall time, which a busy machine spoils, the
processor time of the loop's own thread, which is what the loop pays itself, and of the whole process.
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
from benchmarks.timing import children, num_repeats, save, tool
from headway import Accelerator, ProjectConfiguration


def on_ranks(count: int, folder: Path) -> dict[str, Any]:
    """The rows on so many ranks."""
    path = folder / f"rows{count}.json"
    words = ["-m", "benchmarks.recovery.worker", str(path), str(num_repeats(12))]
    command = [sys.executable, *words] if count == 1 else [tool("headway"), "launch", "--cpu", "-n", str(count), *words]
    subprocess.run(command, check=True, env={**os.environ, "BENCHMARK_RUN": str(folder / f"run{count}")})
    return {f"{count} rank{'s' * (count > 1)}: {name}": row for name, row in json.loads(path.read_text()).items()}


def first_iteration() -> None:
    """In a process of its own: the first update of a compiled model, in seconds."""
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, keep_compiled=sys.argv[2] == "kept")
    accelerator = Accelerator(cpu=True, project_config=project, dynamo_backend="inductor")
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.resume("latest")
    wall, cpu = time.perf_counter(), time.process_time() + children()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.zeros(BATCH, LENGTH, dtype=torch.long)).square().mean())
        optimizer.step()
    sys.stdout.write(json.dumps([time.perf_counter() - wall, time.process_time() + children() - cpu]))
    accelerator.save_state()


def compiled(folder: Path) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds of first iterations: of a new run, and of resumed ones whose machine has empty caches."""
    rows = {}
    for name, way in (("new run", "kept"), ("resumed, keep_compiled", "kept"), ("resumed, without", "left")):
        with tempfile.TemporaryDirectory() as cache:
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.recovery.measure", "first", way], cwd=folder, check=True, text=True,
                stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HEADWAY_HOME": str(folder),
                                             "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        rows[name] = tuple(json.loads(ran.stdout))
    return rows


def main() -> None:
    """Measure and save."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        folder = Path(name)
        rows = {**on_ranks(1, folder), **on_ranks(2, folder)}
        compile_folder = folder / "compiled"
        compile_folder.mkdir()
        note = "CPU: of the loop's own thread. Added: by one save, or by one kept update. First iterations: "
        note += "; ".join(
            f"{name} {cpu:.1f} s of CPU, {wall:.1f} s" for name, (wall, cpu) in compiled(compile_folder).items()
        )
    save("recovery", "ms", rows, note)


if __name__ == "__main__":
    first_iteration() if "first" in sys.argv[1:2] else main()
