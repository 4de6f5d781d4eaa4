"""A progress bar with loss, rate, memory and remaining time on one rank; without a terminal, plain lines.

    headway launch --cpu -n 2 examples/by_feature/progress.py

One bar per epoch, followed by the accuracy.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed, track  # feature

NUM_EPOCHS = 3


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 digits as (training, evaluation): 64 pixels from 0 to 1, and the class."""
    pixels, classes = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    training, evaluation = order[400:], order[:400]
    return TensorDataset(inputs[training], targets[training]), TensorDataset(inputs[evaluation], targets[evaluation])


def main() -> float:
    set_seed(0)
    accelerator = Accelerator()
    training, evaluation = read_digits()
    train_loader = DataLoader(training, batch_size=16, shuffle=True)
    eval_loader = DataLoader(evaluation, batch_size=64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(NUM_EPOCHS):
        model.train()
        bar = track(train_loader, description=f"epoch {epoch}")  # feature
        for inputs, targets in bar:  # feature
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            bar.show(loss=loss)  # feature
            bar.add(samples=len(targets) * accelerator.num_data_shards)  # feature

        model.eval()
        num_correct, num_samples = 0, 0
        for inputs, targets in eval_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=1)
            # From all ranks, without the samples that were repeated to fill the last batch.
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            num_correct += (predictions == targets).sum().item()
            num_samples += len(targets)
        accelerator.print(f"epoch {epoch}: accuracy {num_correct / num_samples:.1%} of {num_samples} samples")

    accelerator.end_training()
    return num_correct / num_samples


if __name__ == "__main__":
    main()
