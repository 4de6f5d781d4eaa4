"""Find a batch size before training: a memory forecast, a search that starts at its answer, and the training.

    python examples/forecast.py
    headway launch --cpu -n 2 examples/forecast.py --budget 16MiB

On a GPU, the budget is the device's free memory. On a CPU, it is --budget. The script prints the forecast with its largest batch,
and the last loss of a training with batches of that size.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, find_executable_batch_size, set_seed

compute_loss = nn.functional.cross_entropy


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def read_digits() -> TensorDataset:
    """Return scikit-learn's 1,797 digits: 64 pixels from 0 to 1, and the class."""
    pixels, classes = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="default: 3")
    parser.add_argument("--budget", default="8MiB", help="memory budget on a CPU (default: 8MiB)")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()
    data = read_digits()

    model = build_model()
    forecast = accelerator.forecast(
        model,
        data[:32],
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=compute_loss,
        budget=args.budget if accelerator.device.type == "cpu" else None,
    )
    accelerator.print(forecast.describe())
    del model

    # Each process forecasts for its own device. All of them train with the smallest of these batch sizes.
    forecast_sizes = accelerator.gather(torch.tensor([forecast.largest_batch or 1], device=accelerator.device))
    largest = min(int(forecast_sizes.min()), len(data))

    @find_executable_batch_size(starting_batch_size=largest, search="largest", max_batch_size=largest)
    def try_batch_size(batch_size: int) -> int:
        """Run two real updates, because a forecast has a margin of error."""
        accelerator.free_memory()
        model = build_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        inputs, classes = data[:batch_size]
        inputs, classes = inputs.to(accelerator.device), classes.to(accelerator.device)
        for _ in range(2):
            accelerator.backward(compute_loss(model(inputs), classes))
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    batch_size = try_batch_size()
    accelerator.free_memory()
    model = build_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), DataLoader(data, batch_size=batch_size, shuffle=True)
    )
    for _ in range(args.epochs):
        for inputs, classes in loader:
            loss = compute_loss(model(inputs), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    last_loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"trained with batches of {batch_size}: last loss {last_loss:.3f}")
    accelerator.end_training()
    return batch_size


if __name__ == "__main__":
    main()
