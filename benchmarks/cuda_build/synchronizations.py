"""How often the host waits in an update, counted from the calls that the CUDA runtime gets.

`python -m benchmarks.cuda_build.synchronizations`, on the simulated runtime (`make cuda` sets it up). One device: every loop of
tests/synchronizations, beside what docs/synchronizations.md says. Several ranks: set-up, updates, saves and a load of each layout.
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
from tests.synchronizations.test_counts import table

ROOT = Path(__file__).parents[2]
COPIES = [f"copy: {host} host to device" for host in ("pageable", "pinned")]
COPIES += [f"copy: device to {host} host" for host in ("pageable", "pinned")]


class Counter:
    """What the runtime was asked for since the last look: waits, pageable copies, pinned copies, kernels."""

    def __init__(self) -> None:
        self._before: dict[str, int] = simulated_cuda.counts()

    def look(self) -> list[int]:
        now = simulated_cuda.counts()
        new = {name: now[name] - self._before.get(name, 0) for name in now}
        self._before = now
        pageable = sum(new.get(name, 0) for name in COPIES if "pageable" in name)
        return [count_waits(new), pageable, sum(new.get(name, 0) for name in COPIES) - pageable, new.get("kernel", 0)]


def one_device() -> None:
    said = table()
    print(
        "| feature | the page | waits of the runtime | pageable copies | pinned copies | kernels |\n|---|---|---|---|---|---|"
    )
    for name, loop in LOOPS.items():
        process.reset()
        counter: Counter = Counter()
        updates: list[list[int]] = []
        loop(lambda updates=updates, counter=counter: updates.append(counter.look()))
        most = [max(column) for column in zip(*updates[NUM_FIRST:])]
        print(f"| {name} | {said[name]} | " + " | ".join(map(str, most)) + " |", flush=True)


LAYOUTS = {"ddp": 2, "fsdp": 2, "hsdp=2": 4, "tp": 2, "fsdp+tp=2": 4, "cp": 2, "pp": 2}
"""Ranks by layout."""


def build(layout: str) -> tuple[torch.nn.Module, torch.utils.data.Dataset[Any]]:
    """A model and its data: eight linear layers, or a small GPT where a layout needs attention, blocks or a plan."""
    torch.manual_seed(0)
    if layout in ("ddp", "fsdp", "hsdp=2"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        return model, torch.utils.data.TensorDataset(torch.randn(640, 64))
    return cut_models.GPT(), torch.utils.data.TensorDataset(torch.randint(0, 37, (160, 12)))


def a_rank(layout: str) -> None:
    handlers = [TensorParallelOptions(cut_models.GPT_PLAN)] if "tp" in layout else []
    # In float32 the simulated runtime computes no attention of a few queries to more keys.
    precision = "bf16" if layout == "cp" else "no"
    accelerator = Accelerator(strategy=layout, kwargs_handlers=handlers, mixed_precision=precision)
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    found, counter = {"parameters": len(list(model.parameters()))}, Counter()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found["set-up"] = counter.look()
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = counter.look()
        if number < 2:  # optimizers make their state, layouts compare what ranks compute
            found["the first two updates"] = [
                sum(pair) for pair in zip(found.get("the first two updates", [0] * 4), now)
            ]
        elif number >= 12:  # DDP times its first ten
            found["a later update, at most"] = [
                max(pair) for pair in zip(found.get("a later update, at most", now), now)
            ]
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    counter.look()
    accelerator.save_state(folder[0] + "/1")
    found["a save"] = counter.look()
    accelerator.save_state(folder[0] + "/2", blocking=False)
    found["a save in the background, until the loop goes on"] = counter.look()
    accelerator.wait_for_save()
    counter.look()
    accelerator.load_state(folder[0] + "/1")
    found["a load"] = counter.look()
    if accelerator.is_main_process:
        print(json.dumps(found), flush=True)
    accelerator.end_training()


def several_ranks() -> None:
    print(
        "\n| layout | ranks | parameters | | waits | pageable copies | pinned copies | kernels |\n|---|---|---|---|---|---|---|---|"
    )
    environment = {**os.environ, "SIMULATED_CUDA_DEVICES": "4", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for layout, num_ranks in LAYOUTS.items():
        command = [sys.executable, "-m", "headway", "launch", "-n", str(num_ranks), "-q", __file__, layout]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(ran.stderr)
        found = json.loads(lines[0])
        num_parameters = found.pop("parameters")
        for what, numbers in found.items():
            print(
                f"| {layout} | {num_ranks} | {num_parameters} | {what} | " + " | ".join(map(str, numbers)) + " |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        a_rank(sys.argv[1])
    else:
        one_device()
        several_ranks()
