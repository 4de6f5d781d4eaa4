"""How often the host waits in an update, counted from the calls that the CUDA runtime gets.

`python -m benchmarks.cuda_build.synchronisations`, on the simulated runtime (`make cuda` sets it up). One device: every loop of
tests/synchronisations, beside what docs/synchronisations.md says. Two ranks: the set-up, an update, a save and a load of each
layout.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import simulated_cuda
import torch
import torch.nn.functional as F

from headway import Accelerator
from headway.runtime import process
from tests.synchronisations.count import NUM_FIRST
from tests.synchronisations.loops import LOOPS
from tests.synchronisations.test_counts import table

ROOT = Path(__file__).parents[2]
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
)
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
        waits = sum(new.get(name, 0) for name in WAITS)
        pageable = sum(new.get(name, 0) for name in COPIES if "pageable" in name)
        return [waits, pageable, sum(new.get(name, 0) for name in COPIES) - pageable, new.get("kernel", 0)]


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


def a_rank(strategy: str) -> None:
    accelerator, found, counter = Accelerator(strategy=strategy), {}, Counter()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(640, 64))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    found["set-up"] = counter.look()
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), x))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = counter.look()
        if number >= 12:  # DDP times its first ten
            found["an update"] = [max(pair) for pair in zip(found.get("an update", now), now)]
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


def two_ranks() -> None:
    print(
        "\n| two ranks, 16 parameters | | waits | pageable copies | pinned copies | kernels |\n|---|---|---|---|---|---|"
    )
    environment = {**os.environ, "SIMULATED_CUDA_DEVICES": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for strategy in ("ddp", "fsdp"):
        command = [sys.executable, "-m", "headway", "launch", "-n", "2", "-q", __file__, strategy]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if not lines:
            sys.exit(ran.stderr)
        for what, numbers in json.loads(lines[0]).items():
            print(f"| {strategy} | {what} | " + " | ".join(map(str, numbers)) + " |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        a_rank(sys.argv[1])
    else:
        one_device()
        two_ranks()
