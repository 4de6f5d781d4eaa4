"""Helpers for tests of pipelines: an Accelerator, the gathered state, and a training loop through `forward_backward`."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from tests.devices import ON_CPU
from tests.distributed.layouts import PADDING, Curve, Task, build_model, make_optimizer, make_rows, sum_losses


def gather_state(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state on rank 0, and an empty dict on other ranks."""
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def make_accelerator(task: Task, layout: str) -> Accelerator:
    return Accelerator(
        cpu=ON_CPU, strategy=layout, gradient_accumulation_steps=task.steps, mixed_precision=task.precision,
        dataloader_config=DataLoaderConfiguration(even_batches=False), kwargs_handlers=list(task.handlers), **task.options,
    )  # fmt: skip


def train_with_forward_backward(task: Task, layout: str) -> Curve:
    """Train through `forward_backward`."""
    accelerator = make_accelerator(task, layout)
    model = build_model(task)
    optimizer = make_optimizer(task, model)
    per_step = task.window // (task.steps * accelerator.strategy.data_shard.count)
    loader = DataLoader(TensorDataset(*make_rows()), batch_size=per_step)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    curve = run_loop(accelerator, task, model, optimizer, loader)
    curve["weights"] = gather_state(accelerator, model)
    accelerator.end_training()
    return curve


def run_loop(accelerator: Accelerator, task: Task, model: Any, optimizer: Any, loader: Any) -> Curve:
    losses: list[float] = []
    norms: list[float] = []
    total = weight = 0.0
    while len(losses) < task.updates:
        for ids, targets in loader:
            if len(losses) == task.updates:
                break
            if loader.mask is not None:
                targets = targets.masked_fill(~loader.mask[:, None], PADDING)
            loss = accelerator.forward_backward(
                (ids, targets),
                lambda piece: sum_losses(model, *piece),
                weight=lambda piece: (piece[1] != PADDING).sum(),
                reduction="sum",
            )
            num_tokens = accelerator.strategy.data_group.reduce_numbers([float((targets != PADDING).sum())])[0]
            total, weight = total + loss.item() * num_tokens, weight + num_tokens
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), task.clip).item())
                losses.append(total / weight)
                total = weight = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}
