"""Models and loops that several steps train: GPT-2 of any size, a loop in plain PyTorch, and the same loop with a library."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.bench import Bench
from benchmarks.step_cost.measure import Training, make_prepared_loop

Loop = Callable[[], None]
"""Function that passes over a loader once."""
FULL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
MEDIUM = {**FULL, "n_layer": 24, "n_embd": 1024, "n_head": 16}
XL = {**FULL, "n_layer": 48, "n_embd": 1600, "n_head": 25}
SMALL = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 1024}
SMALLEST = {**SMALL, "n_embd": 32}


def build_gpt2(bench: Bench, sizes: dict[str, int]) -> torch.nn.Module:
    """Build transformers' GPT-2 without dropout; its random weights are drawn on the device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    with bench.device:
        model: torch.nn.Module = GPT2LMHeadModel(config)
    return model.train()


def compute_loss(model: Any, batch: Any) -> torch.Tensor:
    """Return the language model loss of a batch (tokens,)."""
    (tokens,) = batch
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def make_tokens(sizes: dict[str, int], num_rows: int) -> torch.Tensor:
    """Return random tokens of shape (num_rows, n_positions)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, sizes["vocab_size"], (num_rows, sizes["n_positions"]), generator=generator)


def build_training(
    bench: Bench, model: torch.nn.Module, sizes: dict[str, int], batch_size: int, num_batches: int
) -> Training:
    """Return the model with AdamW, a loader of `num_batches` pinned batches, and a constant schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(
        TensorDataset(make_tokens(sizes, batch_size * num_batches)), batch_size=batch_size, pin_memory=not bench.is_cpu
    )
    return Training(model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))


def make_plain_loop(
    bench: Bench, training: Training, precision: str = "bf16", steps: int = 1, is_clipped: bool = True
) -> Loop:
    """Return a careful loop in plain PyTorch for one device, which never waits for the device.

    Args:
        bench: Run of the step.
        training: Objects of the loop.
        precision: "bf16", "fp16" (with a gradient scaler) or "no".
        steps: Micro-batches per update.
        is_clipped: Whether gradients are clipped to a norm of 1.
    """
    model, optimizer, loader, scheduler = training.model, training.optimizer, training.loader, training.scheduler
    kind, dtype = bench.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")

    def run() -> None:
        for index, batch in enumerate(loader):
            on_device = [tensor.to(bench.device, non_blocking=True) for tensor in batch]
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                loss = compute_loss(model, on_device)
            scaler.scale(loss / steps).backward()
            if index % steps == steps - 1:
                if is_clipped:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()

    return run


def make_library_loop(library: str, bench: Bench, training: Training, precision: str = "bf16", **options: Any) -> Loop:
    """Return the same loop with the Accelerator of "headway" or "accelerate"."""
    accelerator = make_accelerator(library, bench, mixed_precision=precision, **options)
    return make_prepared_loop(accelerator, training, compute_loss)


def make_accelerator(library: str, bench: Bench, **options: Any) -> Any:
    """Return the library's Accelerator on the step's device."""
    if library == "accelerate":  # its precision is fixed for a process, and a step compares several
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    return import_module(library).Accelerator(cpu=bench.is_cpu, **options)
