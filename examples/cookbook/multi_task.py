"""Two tasks with data sets of different sizes, one shared network and two heads.

Run: headway launch --cpu -n 2 examples/cookbook/multi_task.py

The tasks are one data set whose rows name their task, and a sampler draws both equally often. Each row has one loss, so the mean
is exact on any number of processes, however many rows of a task a process gets. Metrics are gathered by task. Prints the loss of
each task after each epoch.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, WeightedRandomSampler

from headway import Accelerator, set_seed

CLASSES, SIZE = 0, 1
"""The tasks: classify the point, and measure its distance from the center."""


def make_task(task: int, num_rows: int, seed: int) -> TensorDataset:
    """Return rows of (point, target, task)."""
    points = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(seed))
    target = (points[:, 0] > points[:, 1]).float() if task == CLASSES else points.norm(dim=1)
    return TensorDataset(points, target, torch.full((num_rows,), task))


class TwoHeads(nn.Module):
    """A shared trunk and one head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.ReLU())
        self.classes = nn.Linear(32, 2)
        self.size = nn.Linear(32, 1)

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of both heads. Each head takes part in every step, so no gradient is ever missing."""
        hidden = self.trunk(points)
        return self.classes(hidden), self.size(hidden).squeeze(1)


def compute_row_losses(
    logits: torch.Tensor, size: torch.Tensor, target: torch.Tensor, task: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each row, by its task."""
    is_class = task == CLASSES
    class_losses = cross_entropy(logits, torch.where(is_class, target, 0).long(), reduction="none")
    return torch.where(is_class, class_losses, (size - target).square())


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    """Return the mean loss of each task over all ranks."""
    model.eval()
    all_losses, all_tasks = [], []
    with torch.no_grad():
        for points, target, task in loader:
            row_losses = compute_row_losses(*model(points), target, task)
            row_losses, task = accelerator.gather_for_metrics((row_losses, task))
            all_losses.append(row_losses)
            all_tasks.append(task)
    model.train()
    losses, tasks = torch.cat(all_losses), torch.cat(all_tasks)
    return {"classes": losses[tasks == CLASSES].mean().item(), "size": losses[tasks == SIZE].mean().item()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator()
    class_rows, size_rows = make_task(CLASSES, 800, seed=0), make_task(SIZE, 100, seed=1)
    training = ConcatDataset([class_rows, size_rows])
    evaluation = ConcatDataset([make_task(CLASSES, 120, seed=10), make_task(SIZE, 120, seed=11)])
    # The chance of a row is inverse to the size of its data set, so each task gets half of the draws.
    weights = [1 / len(class_rows)] * len(class_rows) + [1 / len(size_rows)] * len(size_rows)
    sampler = WeightedRandomSampler(weights, num_samples=800, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(training, batch_size=32 // accelerator.num_data_shards, sampler=sampler)
    eval_loader = DataLoader(evaluation, batch_size=50)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)

    for epoch in range(args.epochs):
        for points, target, task in loader:
            with accelerator.accumulate(model):
                accelerator.backward(compute_row_losses(*model(points), target, task).mean())
                optimizer.step()
                optimizer.zero_grad()
        task_losses = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in task_losses.items()))

    accelerator.end_training()
    return task_losses


if __name__ == "__main__":
    main()
