"""Two ranks that share one card: their training beside one process's, over gloo and over the device's own backend.

NCCL refuses two ranks on one device of one host. Each rank here says that it is a host of its own (NCCL_HOSTID), so they talk
over the loopback interface; the environment is what torchrun sets for two machines of one process each.
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

from benchmarks.gpu.bench import Bench, Row, scratch
from headway import Accelerator, InitProcessGroupKwargs

NUM_RANKS, GLOBAL_BATCH, WIDTH = 2, 32, 256
OF_ONE_HOST = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}  # fmt: skip


def run(bench: Bench) -> None:
    """One process, then two ranks over each backend."""
    num_updates = bench.choose(50, 20, 4)
    with bench.attempt("one process"):
        alone = ranks(bench, 1, "gloo", num_updates)[0]
        bench.row(Row("one process", alone["updates_per_second"], "updates/s"))
    if bench.has_failed:
        return
    own = dist.Backend.default_device_backend_map.get(bench.device.type, "gloo")
    if own == "gloo":
        bench.row(Row("the device's own backend", note=f"left out: {bench.device.type} has none but gloo"))
    for backend in dict.fromkeys(("gloo", own)):
        with bench.attempt(f"two ranks, {backend}"):
            found = ranks(bench, NUM_RANKS, backend, num_updates)
            apart = max(abs(a - b) for rank in found for a, b in zip(rank["losses"], alone["losses"]))
            between = max(abs(a - b) for a, b in zip(found[0]["weights"], found[-1]["weights"]))
            bench.row(
                Row(
                    f"two ranks, {backend}", found[0]["updates_per_second"], "updates/s", alone["updates_per_second"], "one process",
                    "losses of one process to 1e-4, equal weights", apart < 1e-4 and between == 0.0,
                    f"losses differ by at most {apart:.1e}, weights between ranks by {between:.1e}; {found[0]['about']}",
                )
            )  # fmt: skip


def ranks(bench: Bench, count: int, backend: str, num_updates: int) -> list[dict[str, Any]]:
    """What each rank told.

    Raises:
        RuntimeError: a rank failed, or they took too long; with its last lines.
    """
    limit = bench.choose(30.0, 120.0, 120.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    files = [scratch() / f"{backend}-{count}-{rank}.json" for rank in range(count)]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.steps.ranks", str(bench.device.type), backend, str(num_updates), str(file)],
            env={**os.environ, **OF_ONE_HOST, **common, "RANK": str(rank), "NCCL_HOSTID": f"headway-{rank}"},
            stdout=file.with_suffix(".log").open("w"), stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    try:
        for process in started:
            process.wait(limit)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not end in {limit:.0f} s") from error
    finally:
        for process in started:
            process.kill()
    for file, process in zip(files, started):
        if process.returncode:
            told = file.with_suffix(".log").read_text().strip()
            bench.say(told)
            raise RuntimeError(
                f"a rank ended with {process.returncode}: {(told or 'it said nothing').splitlines()[-1]}"
            )
    return [json.loads(file.read_text()) for file in files]


def worker(kind: str, backend: str, num_updates: int, file: Path) -> None:
    """One rank: train on its share of the global batch, and tell."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=kind == "cpu", kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    inputs = torch.randn(GLOBAL_BATCH * num_updates, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    losses = []
    begun = perf_counter()
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    seconds = perf_counter() - begun
    weights = [parameter.detach().double().sum().item() for parameter in model.parameters()]
    found = {
        "losses": losses, "weights": weights, "updates_per_second": num_updates / seconds,
        "about": f"{accelerator.device}, {dist.get_backend() if dist.is_initialized() else 'no process group'}",
    }  # fmt: skip
    file.write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
