"""Training on two ranks that share one device, compared with one process, over gloo and over the device's own backend.

NCCL refuses two ranks on one device of one host. So each rank claims to be a separate host (NCCL_HOSTID), and they communicate
over the loopback interface. The environment is that of torchrun on two machines with one process each.

`python -m benchmarks.gpu ranks` runs only this step; with `--device cpu`, at a small size.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.bench import Bench, Row, get_scratch_folder
from headway import Accelerator, InitProcessGroupKwargs

NUM_RANKS, GLOBAL_BATCH, WIDTH = 2, 32, 256
LOOPBACK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}  # fmt: skip


def run(bench: Bench) -> None:
    """Train in one process, then on two ranks over each backend."""
    num_updates = bench.choose(50, 20, 4)
    with bench.attempt("one process"):
        single = run_ranks(bench, 1, "gloo", num_updates)[0]
        bench.add_row(Row("one process", single["updates_per_second"], "updates/s"))
    if bench.has_failed:
        return
    device_backend = dist.Backend.default_device_backend_map.get(bench.device.type, "gloo")
    if device_backend == "gloo":
        bench.add_row(Row("the device's own backend", note=f"left out: {bench.device.type} has only gloo"))
    for backend in dict.fromkeys(("gloo", device_backend)):
        with bench.attempt(f"two ranks, {backend}"):
            results = run_ranks(bench, NUM_RANKS, backend, num_updates)
            loss_difference = max(abs(a - b) for rank in results for a, b in zip(rank["losses"], single["losses"]))
            weight_difference = max(abs(a - b) for a, b in zip(results[0]["weights"], results[-1]["weights"]))
            bench.add_row(
                Row(
                    f"two ranks, {backend}",
                    results[0]["updates_per_second"],
                    "updates/s",
                    single["updates_per_second"],
                    "one process",
                    "losses of one process to 1e-4, equal weights",
                    loss_difference < 1e-4 and weight_difference == 0.0,
                    f"losses differ by at most {loss_difference:.1e}, weights between ranks by {weight_difference:.1e}; "
                    f"{results[0]['description']}",
                )
            )


def run_ranks(bench: Bench, count: int, backend: str, num_updates: int) -> list[dict[str, Any]]:
    """Train on `count` ranks, and return the result of each.

    Raises:
        RuntimeError: If a rank fails or takes too long. The message has the rank's last line.
    """
    limit = bench.choose(30.0, 120.0, 120.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    files = [get_scratch_folder() / f"{backend}-{count}-{rank}.json" for rank in range(count)]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.steps.ranks", str(bench.device.type), backend, str(num_updates), str(file)],
            env={**os.environ, **LOOPBACK_ENVIRONMENT, **common, "RANK": str(rank), "NCCL_HOSTID": f"headway-{rank}"},
            stdout=file.with_suffix(".log").open("w"), stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    try:
        for process in processes:
            process.wait(limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not end in {limit:.0f} s") from error
    finally:
        for process in processes:
            process.kill()
    for file, process in zip(files, processes):
        if process.returncode:
            output = file.with_suffix(".log").read_text().strip()
            bench.print_line(output)
            last_line = (output or "no output").splitlines()[-1]
            raise RuntimeError(f"a rank ended with exit code {process.returncode}: {last_line}")
    return [json.loads(file.read_text()) for file in files]


def train_rank(device_type: str, backend: str, num_updates: int, file: Path) -> None:
    """Train one rank on its share of the global batch, and write its result to a file."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=device_type == "cpu", kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    inputs = torch.randn(GLOBAL_BATCH * num_updates, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    losses = []
    start = perf_counter()
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    seconds = perf_counter() - start
    weights = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    result = {
        "losses": losses, "weights": weights, "updates_per_second": num_updates / seconds,
        "description": f"{accelerator.device}, {dist.get_backend() if dist.is_initialized() else 'no process group'}",
    }  # fmt: skip
    file.write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    train_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
