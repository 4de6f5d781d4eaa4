"""A small convolutional network on scikit-learn's scanned digits: real 8 x 8 images that need no download.

    headway launch examples/vision.py                 every accelerator of this machine
    headway launch --cpu -n 2 examples/vision.py      two CPU processes

Prints how many of the 397 held-out images are classified correctly after each epoch: more than 95% at the end.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed, track


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,797 images, float[1, 8, 8] from 0 to 1, with their classes: (1,400 for training, 397 for evaluation)."""
    digits = load_digits()
    images, classes = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    training, evaluation = order[:1400], order[1400:]
    return TensorDataset(images[training], classes[training]), TensorDataset(images[evaluation], classes[evaluation])


def build_model() -> nn.Module:
    # Unlike BatchNorm, GroupNorm does not mix samples. So the result does not depend on the number of processes.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


@torch.no_grad()
def count_correct(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[int, int]:
    """Return (correctly classified images, images) over the whole evaluation set. Each image counts once."""
    model.eval()
    num_correct, num_images = 0, 0
    for images, classes in loader:
        predictions, classes = accelerator.gather_for_metrics((model(images).argmax(dim=1), classes))
        num_correct += (predictions == classes).sum().item()
        num_images += len(classes)
    return num_correct, num_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process (default: 32)")
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    training, evaluation = read_digits()
    train_loader = DataLoader(training, batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(evaluation, batch_size=100)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # T_max is that of one process. On two processes, the schedule advances twice per update, so it ends in the same epoch.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
    model, optimizer, scheduler, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )
    for epoch in range(args.epochs):
        model.train()
        bar = track(train_loader, description=f"epoch {epoch}")
        for images, classes in bar:
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(images), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bar.show(loss=loss)
        num_correct, num_images = count_correct(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: {num_correct} of {num_images} right, {num_correct / num_images:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
