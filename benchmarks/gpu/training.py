"""Models and loops that several steps train: GPT-2 of any size, the loop by hand, and the same loop through a library."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.bench import Bench
from benchmarks.step_cost.measure import prepared

Loop = Callable[[], None]
FULL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
MEDIUM = {**FULL, "n_layer": 24, "n_embd": 1024, "n_head": 16}
XL = {**FULL, "n_layer": 48, "n_embd": 1600, "n_head": 25}
SMALL = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 1024}
SMALLEST = {**SMALL, "n_embd": 32}


def gpt2(bench: Bench, sizes: dict[str, int]) -> torch.nn.Module:
    """GPT-2 as transformers has it, without dropout; its random weights are drawn on the device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    with bench.device:
        model: torch.nn.Module = GPT2LMHeadModel(config)
    return model.train()


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """A language model's loss of one batch: (tokens,)."""
    (tokens,) = batch
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def tokens_of(sizes: dict[str, int], num_rows: int) -> torch.Tensor:
    """Random tokens, num_rows x n_positions."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, sizes["vocab_size"], (num_rows, sizes["n_positions"]), generator=generator)


def parts(bench: Bench, model: torch.nn.Module, sizes: dict[str, int], batch: int, num_batches: int) -> tuple[Any, ...]:
    """Model, AdamW, a loader of pinned batches, and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(
        TensorDataset(tokens_of(sizes, batch * num_batches)), batch_size=batch, pin_memory=not bench.is_cpu
    )
    return model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def by_hand(
    bench: Bench, made: tuple[Any, ...], precision: str = "bf16", steps: int = 1, is_clipped: bool = True
) -> Loop:
    """One pass over the loader, as a careful person writes it for one device: nothing in it waits for the device."""
    model, optimizer, loader, scheduler = made
    kind, dtype = bench.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")

    def run() -> None:
        for index, batch in enumerate(loader):
            moved = [tensor.to(bench.device, non_blocking=True) for tensor in batch]
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                loss = loss_of(model, moved)
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


def through(library: str, bench: Bench, made: tuple[Any, ...], precision: str = "bf16", **options: Any) -> Loop:
    """The same pass through "headway" or "accelerate"."""
    return prepared(accelerator_of(library, bench, mixed_precision=precision, **options), made, loss_of)


def accelerator_of(library: str, bench: Bench, **options: Any) -> Any:
    """The library's Accelerator on the step's device."""
    if library == "accelerate":  # a process of its has one precision for good, and a step compares several
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    return import_module(library).Accelerator(cpu=bench.is_cpu, **options)
