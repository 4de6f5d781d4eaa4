"""Checkpoints: kill the script at any moment and start it again, and it continues at the next batch.

    headway launch --cpu -n 2 examples/by_feature/checkpointing.py

Saves run in the background, and `resume` restores everything, including the position in the data. So the last line is the same,
whether or not the script was killed in between. A finished run removes its checkpoints in runs/digits.
"""

import shutil  # feature

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed  # feature

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
    project = ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=2)  # feature
    accelerator = Accelerator(project_config=project)  # feature
    training, evaluation = read_digits()
    train_loader = DataLoader(training, batch_size=16, shuffle=True)
    eval_loader = DataLoader(evaluation, batch_size=64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    accelerator.resume("latest")  # feature: without a checkpoint, the run starts from the beginning
    for epoch in accelerator.epochs(NUM_EPOCHS):  # feature
        model.train()
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.num_updates % 20 == 0:  # feature
                accelerator.save_state(blocking=False)  # feature: written in the background

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

    accelerator.wait_for_save()  # feature
    if accelerator.is_main_process:  # feature
        shutil.rmtree("runs/digits")  # feature: a finished run does not need its checkpoints
    accelerator.end_training()
    return num_correct / num_samples


if __name__ == "__main__":
    main()
