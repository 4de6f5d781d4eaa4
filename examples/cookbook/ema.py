"""An exponential moving average (EMA) of the weights, evaluated, saved in checkpoints and exported.

Run: headway launch --cpu -n 2 examples/cookbook/ema.py

Prepared optimizers update the average once per update. With `--strategy fsdp` in the command, each rank averages its own
shards (docs/ema.md). Prints the accuracy of the weights and of their average after each epoch.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ExponentialMovingAverage, set_seed


def make_data(num_rows: int, seed: int) -> TensorDataset:
    """Return points on a plane, and whether each is in the first or third quadrant. One label in ten is wrong."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num_rows, 2, generator=generator)
    classes = points[:, 0] * points[:, 1] > 0
    is_wrong = torch.rand(num_rows, generator=generator) < 0.1
    return TensorDataset(points, (classes ^ is_wrong).long())


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> float:
    """Return the accuracy over all ranks."""
    model.eval()
    num_correct = 0
    num_rows = 0
    with torch.no_grad():
        for points, classes in loader:
            predictions, classes = accelerator.gather_for_metrics((model(points).argmax(1), classes))
            num_correct += (predictions == classes).sum().item()
            num_rows += len(classes)
    model.train()
    return num_correct / num_rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/ema")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator()
    train_loader = DataLoader(make_data(512, seed=1), batch_size=16 // accelerator.num_data_shards, shuffle=True)
    eval_loader = DataLoader(make_data(500, seed=2), batch_size=64)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    ema = ExponentialMovingAverage(model, decay=0.98)  # a part of each checkpoint from now on

    for epoch in range(args.epochs):
        for points, classes in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(points), classes))
                optimizer.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, eval_loader)
        with ema.swap_weights():
            averaged_accuracy = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}, of the average {averaged_accuracy:.3f}")

    accelerator.save_state(f"{args.folder}/checkpoint")
    accelerator.save_model(model, f"{args.folder}/averaged_weights", weights=ema.name)
    with ema.swap_weights():
        weight = accelerator.get_state_dict(model).get("0.weight")  # on the main process, if the model is sharded
    result = {
        "accuracy": averaged_accuracy,
        "weight": None if weight is None else weight.detach().cpu().clone(),
        "updates": ema.num_updates,
    }
    accelerator.end_training()
    return result


if __name__ == "__main__":
    main()
