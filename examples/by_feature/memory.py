"""A batch size that fits into memory: the search starts at 64 and halves it until all ranks can train.

    headway launch --cpu -n 2 examples/by_feature/memory.py

The global batch stays the same, because the accumulation grows as the batch size shrinks. Here more than 16 rows do not fit, so
the last line is `batch size 16`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, find_executable_batch_size, set_seed  # feature

NUM_EPOCHS = 3


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 digits as (training, evaluation): 64 pixels from 0 to 1, and the class."""
    pixels, classes = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    training, evaluation = order[400:], order[:400]
    return TensorDataset(inputs[training], targets[training]), TensorDataset(inputs[evaluation], targets[evaluation])


def check_memory(num_rows: int) -> None:  # feature
    if num_rows > 16:  # feature: simulates a device that is too small
        raise MemoryError(f"no memory for {num_rows} rows")  # feature


def main() -> float:
    set_seed(0)
    accelerator = Accelerator()
    training, evaluation = read_digits()

    # feature: everything that takes memory is created inside, so that a failed attempt frees it
    @find_executable_batch_size(starting_batch_size=64, keep_global_batch=True)  # feature
    def train(batch_size: int, gradient_accumulation_steps: int) -> float:  # feature
        accelerator.free_memory()  # feature
        accelerator.gradient_accumulation_steps = gradient_accumulation_steps  # feature
        train_loader = DataLoader(training, batch_size=batch_size, shuffle=True)  # feature
        eval_loader = DataLoader(evaluation, batch_size=64)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # feature: a higher rate for larger batches
        model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

        for epoch in range(NUM_EPOCHS):
            model.train()
            for inputs, targets in train_loader:
                with accelerator.accumulate(model):  # feature
                    check_memory(len(inputs))  # feature
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

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
        return num_correct / num_samples  # feature

    accuracy = train()  # feature
    accelerator.print(f"batch size {train.batch_size}")  # feature
    accelerator.end_training()
    return accuracy  # feature


if __name__ == "__main__":
    main()
