"""torch's CUDA sanitizer on the features of Headway that use a stream, and on a deliberate race.

`python -m benchmarks.cuda_build.sanitizer [feature ...]` runs each feature in a separate process on the simulated runtime
(`make cuda` sets it up), and counts the sanitizer's reports.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import headway
from headway import (
    Accelerator,
    DataLoaderConfiguration,
    PipelineOptions,
    ShardingOptions,
    TensorParallelOptions,
    TorchDynamoPlugin,
)
from tests.distributed import cut_models
from tests.distributed.layouts import MODELS, VOCABULARY, Task, train_prepared
from tests.distributed.pipelines import train_with_forward_backward

FEATURES: dict[str, Callable[[], Any]] = {}
WIDTH = 512
MODELS["gpt, cut"] = lambda: cut_models.GPT(VOCABULARY)


def register_feature(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as a feature to check."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        FEATURES[name] = function
        return function

    return register


def build_net(depth: int = 4) -> nn.Sequential:
    """Build a small perceptron."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


def train(accelerator: Accelerator, model: nn.Module, num_updates: int = 4) -> nn.Module:
    """Train the model with Headway's loop, and return the prepared model."""
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


@register_feature("a deliberate race")
def run_deliberate_race() -> None:
    side, x = torch.cuda.Stream(), torch.rand(4, 2, device="cuda")
    with torch.cuda.stream(side):
        torch.mul(x, 5, out=x)


@register_feature("loading on a side stream, clipping")
def train_with_side_stream() -> None:
    train(Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True)), build_net())


@register_feature("accumulation")
def train_with_accumulation() -> None:
    train(Accelerator(gradient_accumulation_steps=2), build_net())


@register_feature("bf16 and the guard")
def train_with_guard() -> None:
    train(Accelerator(mixed_precision="bf16", on_non_finite="skip"), build_net())


@register_feature("fp16")
def train_in_fp16() -> None:
    train(Accelerator(mixed_precision="fp16"), build_net())


@register_feature("micro-batches after running out of memory")
def train_in_microbatches() -> None:
    accelerator = Accelerator(microbatching="auto")
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def loss(piece: torch.Tensor) -> torch.Tensor:
        torch.empty(len(piece) << 30, dtype=torch.uint8, device="cuda")
        return model(piece).square().mean()

    for _ in range(3):
        accelerator.forward_backward(torch.randn(128, WIDTH, device="cuda"), loss)
        optimizer.step()
        optimizer.zero_grad()


@register_feature("recomputation")
def train_with_recomputation() -> None:
    accelerator, model = Accelerator(), build_net()
    accelerator.checkpoint_activations(model)
    train(accelerator, model)


@register_feature("activations in host memory")
def offload_activations() -> None:
    from headway.extras.activation_offload import offload_saved_tensors

    model = build_net().cuda()
    for _ in range(3):
        with offload_saved_tensors(min_bytes=1):
            out = model(torch.randn(512, WIDTH, device="cuda"))
        out.square().mean().backward()


@register_feature("weights in host memory (cpu_offload)")
def offload_weights() -> None:
    model = headway.cpu_offload(build_net().eval(), torch.device("cuda:0"))
    for _ in range(3):
        model(torch.randn(4, WIDTH, device="cuda"))


@register_feature("weights on disk (disk_offload)")
def offload_to_disk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = headway.disk_offload(build_net().eval(), folder, torch.device("cuda:0"))
        for _ in range(3):
            model(torch.randn(4, WIDTH, device="cuda"))


@register_feature("dispatched over a device and the host")
def dispatch_over_devices() -> None:
    model = headway.dispatch_model(build_net().eval(), {str(i): 0 if i < 2 else "cpu" for i in range(4)})
    for _ in range(3):
        model(torch.randn(4, WIDTH))


@register_feature("saves in the background, then more updates, then a load")
def save_in_background() -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        model = train(accelerator, build_net())
        for number in range(2):
            accelerator.save_state(f"{folder}/{number}", blocking=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        accelerator.wait_for_save()
        accelerator.load_state(f"{folder}/1")


@register_feature("a moving average of the weights")
def average_weights() -> None:
    accelerator = Accelerator()
    model = build_net()
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    model = train(accelerator, model)
    accelerator.prepare(mean).update_parameters(accelerator.unwrap_model(model))


@register_feature("blocks compiled with aot_eager")
def train_compiled() -> None:
    train(Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)), build_net())


def train_on_ranks(strategy: str) -> None:
    accelerator = Accelerator(strategy=strategy)
    train(accelerator, build_net())
    accelerator.end_training()


def train_with_split_sequences() -> None:
    """Train under context parallelism with 128 tokens, so that each rank has enough for torch's ring attention."""
    accelerator = Accelerator(strategy="cp", mixed_precision="bf16")
    torch.manual_seed(0)
    model = cut_models.llama(max_position_embeddings=128, use_cache=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(0, 30, (4, 128), device=accelerator.device)
    for _ in range(3):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


TENSOR = Task("gpt, cut", updates=4, optimizer="fused", handlers=(TensorParallelOptions(cut_models.GPT_PLAN),))
SCHEDULE = Task("gpt", updates=4, window=16, handlers=(PipelineOptions(schedule="1f1b", num_microbatches=4),))
RANKS: dict[str, Callable[[], Any]] = {
    "ddp, 2": lambda: train_on_ranks("ddp"),
    "fsdp, 2": lambda: train_on_ranks("fsdp"),
    "hsdp=2, 4": lambda: train_on_ranks("hsdp=2"),
    "fsdp in bf16, 2": lambda: train_prepared(Task("gpt", precision="bf16"), "fsdp"),
    "fsdp with weights in host memory, 2": lambda: train_prepared(
        Task("gpt", handlers=(ShardingOptions(cpu_offload=True),)), "fsdp"
    ),
    "tp, 2": lambda: train_prepared(TENSOR, "tp"),
    "fsdp+tp=2, 4": lambda: train_prepared(TENSOR, "fsdp+tp=2"),
    "cp, torch's ring, 2": train_with_split_sequences,
    "pp, 2": lambda: train_prepared(Task("gpt", updates=4), "pp"),
    "pp, 1f1b, 2": lambda: train_with_forward_backward(SCHEDULE, "pp"),
    "ddp=2+pp=2, 4": lambda: train_prepared(Task("gpt", updates=4), "ddp=2+pp=2"),
}
"""Runs by "<layout>, <number of ranks>", with the models of tests/distributed."""
for ranks_name, run in RANKS.items():
    FEATURES[f"{ranks_name} ranks over NCCL"] = run


def main() -> None:
    """Print the table, or run one feature with `--run`."""
    if len(sys.argv) == 3 and sys.argv[1] == "--run":
        FEATURES[sys.argv[2]]()
        torch.cuda.synchronize()
        # Autograd's threads release Python hooks, and abort if the process ends at the same time (torch 2.14).
        time.sleep(0.5)
        return
    print("| feature | reports | ended well |\n|---|---|---|")
    for name in sys.argv[1:] or FEATURES:
        command = [sys.executable, __file__, "--run", name]
        if "ranks" in name:
            command = [sys.executable, "-m", "headway", "launch", "-n", name.split()[-4], "-q", *command[1:]]
        environment = {
            **os.environ, "TORCH_CUDA_SANITIZER": "1", "SIMULATED_CUDA_DEVICES": "4", "OMP_NUM_THREADS": "1", "TEST_DEVICE": "cuda",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        reports = finished.stderr.count("CSAN detected a possible data race")
        ended = "yes" if finished.returncode == 0 else finished.stderr.strip().splitlines()[-1][:150]
        print(f"| {name} | {reports} | {ended} |", flush=True)


if __name__ == "__main__":
    main()
