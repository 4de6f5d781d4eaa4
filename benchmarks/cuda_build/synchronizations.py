"""Number of times that the host waits in an update, counted from calls of the CUDA runtime.

`python -m benchmarks.cuda_build.synchronizations` runs on the simulated runtime (`make cuda` sets it up). The first table has every
loop of tests/synchronizations on one device, with the number in docs/synchronizations.md. The second table has each layout's phases.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import simulated_cuda
import torch

from headway import Accelerator, TensorParallelOptions
from headway.core.runtime import process
from tests.distributed import cut_models
from tests.synchronizations.count import NUM_FIRST
from tests.synchronizations.loops import LOOPS
from tests.synchronizations.runtime_waits import count_waits
from tests.synchronizations.test_counts import read_table

ROOT = Path(__file__).parents[2]
COPIES = [f"copy: {host} host to device" for host in ("pageable", "pinned")]
COPIES += [f"copy: device to {host} host" for host in ("pageable", "pinned")]


class Counter:
    """Counter of the calls of the CUDA runtime since the last reading."""

    def __init__(self) -> None:
        self._before: dict[str, int] = simulated_cuda.counts()

    def read(self) -> list[int]:
        """Return the calls since the last reading: waits, pageable copies, pinned copies, kernels."""
        now = simulated_cuda.counts()
        new = {name: now[name] - self._before.get(name, 0) for name in now}
        self._before = now
        pageable = sum(new.get(name, 0) for name in COPIES if "pageable" in name)
        return [count_waits(new), pageable, sum(new.get(name, 0) for name in COPIES) - pageable, new.get("kernel", 0)]


def print_one_device() -> None:
    """Run every loop of tests/synchronizations on one device, and print each loop's largest counts in an update."""
    documented = read_table()
    print(
        "| feature | documented waits | waits | pageable copies | pinned copies | kernels |\n|---|---|---|---|---|---|"
    )
    for name, loop in LOOPS.items():
        process.reset()
        counter: Counter = Counter()
        updates: list[list[int]] = []
        loop(lambda updates=updates, counter=counter: updates.append(counter.read()))
        largest = [max(column) for column in zip(*updates[NUM_FIRST:])]
        print(f"| {name} | {documented[name]} | " + " | ".join(map(str, largest)) + " |", flush=True)


LAYOUTS = {"ddp": 2, "fsdp": 2, "hsdp=2": 4, "tp": 2, "fsdp+tp=2": 4, "cp": 2, "pp": 2}
"""Number of ranks by layout."""


def build(layout: str) -> tuple[torch.nn.Module, torch.utils.data.Dataset[Any]]:
    """Build a model and its data: eight linear layers, or a small GPT for layouts that need attention, blocks or a plan."""
    torch.manual_seed(0)
    if layout in ("ddp", "fsdp", "hsdp=2"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        return model, torch.utils.data.TensorDataset(torch.randn(640, 64))
    return cut_models.GPT(), torch.utils.data.TensorDataset(torch.randint(0, 37, (160, 12)))


def count_calls_on_rank(layout: str) -> None:
    """Train under a layout, and count this rank's CUDA calls in set-up, updates, saves and a load. Rank 0 prints JSON."""
    handlers = [TensorParallelOptions(cut_models.GPT_PLAN)] if "tp" in layout else []
    # The simulated runtime has no float32 attention with fewer queries than keys.
    precision = "bf16" if layout == "cp" else "no"
    accelerator = Accelerator(strategy=layout, kwargs_handlers=handlers, mixed_precision=precision)
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    counts, counter = {"parameters": len(list(model.parameters()))}, Counter()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts["set-up"] = counter.read()
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = counter.read()
        if number < 2:  # optimizers create their state, and layouts compare what ranks compute
            counts["the first two updates"] = [
                sum(pair) for pair in zip(counts.get("the first two updates", [0] * 4), now)
            ]
        elif number >= 12:  # DDP times its first ten updates
            counts["a later update, at most"] = [
                max(pair) for pair in zip(counts.get("a later update, at most", now), now)
            ]
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    counter.read()
    accelerator.save_state(folder[0] + "/1")
    counts["a save"] = counter.read()
    accelerator.save_state(folder[0] + "/2", blocking=False)
    counts["a background save, until the loop continues"] = counter.read()
    accelerator.wait_for_save()
    counter.read()
    accelerator.load_state(folder[0] + "/1")
    counts["a load"] = counter.read()
    if accelerator.is_main_process:
        print(json.dumps(counts), flush=True)
    accelerator.end_training()


def print_layouts() -> None:
    """Run each layout in LAYOUTS, and print its counts by phase."""
    print(
        "\n| layout | ranks | parameters | phase | waits | pageable copies | pinned copies | kernels |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    environment = {**os.environ, "SIMULATED_CUDA_DEVICES": "4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for layout, num_ranks in LAYOUTS.items():
        command = [sys.executable, "-m", "headway", "launch", "-n", str(num_ranks), "-q", __file__, layout]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(finished.stderr)
        counts = json.loads(lines[0])
        num_parameters = counts.pop("parameters")
        for phase, numbers in counts.items():
            print(
                f"| {layout} | {num_ranks} | {num_parameters} | {phase} | " + " | ".join(map(str, numbers)) + " |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count_calls_on_rank(sys.argv[1])
    else:
        print_one_device()
        print_layouts()
