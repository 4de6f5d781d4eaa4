"""torch's CUDA sanitizer over the features of Headway that touch a stream, and over a planted race.

`python -m benchmarks.cuda_build.sanitizer [feature ...]`. Each feature runs in a process of its own, on the simulated runtime
(`make cuda` sets it up); reports are counted by the sanitizer's text.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import headway
from headway import Accelerator, DataLoaderConfiguration

FEATURES: dict[str, Callable[[], Any]] = {}
WIDTH = 512


def feature(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def enter(function: Callable[[], Any]) -> Callable[[], Any]:
        FEATURES[name] = function
        return function

    return enter


def net(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


def train(accelerator: Accelerator, model: nn.Module, num_updates: int = 4) -> nn.Module:
    data = torch.randn(16 * num_updates, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x).float(), x)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@feature("a planted race")
def race() -> None:
    side, x = torch.cuda.Stream(), torch.rand(4, 2, device="cuda")
    with torch.cuda.stream(side):
        torch.mul(x, 5, out=x)


@feature("loading on a stream of its own, clipping")
def loading() -> None:
    train(Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True)), net())


@feature("accumulation")
def accumulation() -> None:
    train(Accelerator(gradient_accumulation_steps=2), net())


@feature("bf16 and the guard")
def guard() -> None:
    train(Accelerator(mixed_precision="bf16", on_non_finite="skip"), net())


@feature("fp16")
def fp16() -> None:
    train(Accelerator(mixed_precision="fp16"), net())


@feature("batches in pieces after out of memory")
def pieces() -> None:
    accelerator = Accelerator(microbatching="auto")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def loss(piece: torch.Tensor) -> torch.Tensor:
        torch.empty(len(piece) << 30, dtype=torch.uint8, device="cuda")
        return model(piece).square().mean()

    for _ in range(3):
        accelerator.forward_backward(torch.randn(128, WIDTH, device="cuda"), loss)
        optimizer.step()
        optimizer.zero_grad()


@feature("recomputation")
def recomputation() -> None:
    accelerator, model = Accelerator(), net()
    accelerator.checkpoint_activations(model)
    train(accelerator, model)


@feature("activations in host memory")
def activations() -> None:
    from headway.recompute.offload import offloading

    model = net().cuda()
    for _ in range(3):
        with offloading(min_bytes=1):
            out = model(torch.randn(512, WIDTH, device="cuda"))
        out.square().mean().backward()


@feature("weights in host memory (cpu_offload)")
def weights() -> None:
    model = headway.cpu_offload(net().eval(), torch.device("cuda:0"))
    for _ in range(3):
        model(torch.randn(4, WIDTH, device="cuda"))


@feature("weights on disk (disk_offload)")
def disk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = headway.disk_offload(net().eval(), folder, torch.device("cuda:0"))
        for _ in range(3):
            model(torch.randn(4, WIDTH, device="cuda"))


@feature("dispatched over a device and the host")
def dispatch() -> None:
    model = headway.dispatch_model(net().eval(), {str(i): 0 if i < 2 else "cpu" for i in range(4)})
    for _ in range(3):
        model(torch.randn(4, WIDTH))


@feature("saves in the background, then more updates, then a load")
def saves() -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        model = train(accelerator, net())
        for number in range(2):
            accelerator.save_state(f"{folder}/{number}", blocking=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        accelerator.wait_for_save()
        accelerator.load_state(f"{folder}/1")


@feature("a moving average of the weights")
def average() -> None:
    accelerator = Accelerator()
    model = net()
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    model = train(accelerator, model)
    accelerator.prepare(mean).update_parameters(accelerator.unwrap_model(model))


def on_two_ranks(strategy: str) -> Callable[[], None]:
    return lambda: (train(accelerator := Accelerator(strategy=strategy), net()), accelerator.end_training())[-1]


for each in ("ddp", "fsdp"):
    FEATURES[f"{each}, two ranks over NCCL"] = on_two_ranks(each)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--run":
        FEATURES[sys.argv[2]]()
        torch.cuda.synchronize()
        time.sleep(
            0.5
        )  # autograd's threads still let go of hooks of Python's, and abort if it ends meanwhile (torch 2.14)
        return
    print("| feature | reports | ended |\n|---|---|---|")
    for name in sys.argv[1:] or FEATURES:
        command = [sys.executable, __file__, "--run", name]
        if "two ranks" in name:
            command = [sys.executable, "-m", "headway", "launch", "-n", "2", "-q", *command[1:]]
        environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "SIMULATED_CUDA_DEVICES": "2", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        reports = ran.stderr.count("CSAN detected a possible data race")
        ended = "yes" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1][:150]
        print(f"| {name} | {reports} | {ended} |", flush=True)


if __name__ == "__main__":
    main()
