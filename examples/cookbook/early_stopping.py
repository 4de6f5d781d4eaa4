"""Early stopping and the best checkpoint in your own loop.

Run: headway launch --cpu -n 2 examples/cookbook/early_stopping.py

The training stops when the validation loss has not improved for five epochs, on all processes in the same epoch. Then
the best weights are restored and written to a file. If you kill the script and run it again, it continues with the same count.
Prints the validation loss of each epoch, and at the end which checkpoint was restored.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, EarlyStopping, ProjectConfiguration, set_seed


def make_data(num_rows: int, seed: int) -> TensorDataset:
    """Return noisy samples of a sum of 16 numbers: few enough that the network overfits."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_rows, 16, generator=generator)
    noise = torch.randn(num_rows, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + noise)


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> float:
    """Return the mean loss over all samples, equal on all ranks."""
    model.eval()
    total = 0.0
    count = 0
    with torch.no_grad():
        for inputs, targets in loader:
            losses = (model(inputs) - targets).square().flatten()
            total += losses[: loader.num_valid].sum().item()  # without the samples that only fill up a batch
            count += loader.num_valid
    model.train()
    return float(accelerator.reduce_mean(total, count))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/early_stopping")
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args(arguments)

    set_seed(0)
    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, total_limit=1, keep_best="min")
    accelerator = Accelerator(project_config=project)
    train_loader = DataLoader(make_data(64, seed=1), batch_size=16 // accelerator.num_data_shards, shuffle=True)
    eval_loader = DataLoader(make_data(250, seed=2), batch_size=32)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    stopping = EarlyStopping(patience=5, min_delta=0.01)
    accelerator.register_for_checkpointing(stopping)  # a resumed run continues its count
    accelerator.resume()
    num_epochs = 0
    for epoch in accelerator.epochs(args.epochs):
        if stopping.should_stop:  # also if a stopped run is started again
            break
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        loss = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: validation loss {loss:.4f}")
        stopping.update(loss)  # before the save, so that the checkpoint contains the new count
        accelerator.save_state(metric=loss)  # rotation keeps the newest and the best
        num_epochs = epoch + 1

    accelerator.resume("best")
    loss = evaluate(accelerator, model, eval_loader)
    accelerator.save_model(model, f"{args.folder}/best_weights")
    accelerator.print(f"restored {accelerator.best_checkpoint}: validation loss {loss:.4f}")
    best = stopping.best  # restored from the best checkpoint, too
    accelerator.end_training()
    return {"epochs": num_epochs, "loss": loss, "best": best}


if __name__ == "__main__":
    main()
