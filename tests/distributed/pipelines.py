"""What the tests of pipelines share: the loop through `forward_backward`, and a model of as many blocks as schedules need."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from tests.devices import ON_CPU
from tests.distributed.layouts import PADDING, Curve, Task, build, optimizer_of, rows, sum_of_losses


def whole_state(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """On rank 0; nothing elsewhere."""
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def accelerator_of(task: Task, layout: str) -> Accelerator:
    return Accelerator(
        cpu=ON_CPU, strategy=layout, gradient_accumulation_steps=task.steps, mixed_precision=task.precision,
        dataloader_config=DataLoaderConfiguration(even_batches=False), kwargs_handlers=list(task.handlers), **task.options,
    )  # fmt: skip


def as_function(task: Task, layout: str) -> Curve:
    """A run through `forward_backward`."""
    accelerator = accelerator_of(task, layout)
    model = build(task)
    optimizer = optimizer_of(task, model)
    per_step = task.window // (task.steps * accelerator.strategy.data_shard.count)
    loader = DataLoader(TensorDataset(*rows()), batch_size=per_step)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    curve = loop(accelerator, task, model, optimizer, loader)
    curve["weights"] = whole_state(accelerator, model)
    accelerator.end_training()
    return curve


def loop(accelerator: Accelerator, task: Task, model: Any, optimizer: Any, loader: Any) -> Curve:
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
                lambda piece: sum_of_losses(model, *piece),
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
