"""A contrastive loss whose negatives come from all processes.

Run: headway launch --cpu -n 2 examples/cookbook/contrastive.py

Each process computes the loss of the whole batch. Its own rows carry gradients, and the others' rows are constants. The
sum of these gradients over the processes is the gradient of the whole batch: `reduction="sum"` takes that sum, and
divides by the number of rows on all processes. The weights are those of one process with the same batch.

Prints the loss of each epoch, which is the same on any number of processes.

Gradient accumulation does not replace a large batch here, because negatives come from one micro-batch only.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed

TEMPERATURE = 0.1


class TwoTowers(nn.Module):
    """Two encoders, such as one for images and one for captions, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(1 / TEMPERATURE).log())

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the normalized embeddings of both sides, and the factor for their similarities."""
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1), self.scale.exp()


def gather_with_own_gradients(accelerator: Accelerator, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all data shards, in which only this rank's rows carry gradients."""
    all_rows = accelerator.gather_for_metrics(rows.detach())  # one process of each data shard
    first = accelerator.data_shard_index * len(rows)
    return torch.cat((all_rows[:first], rows, all_rows[first + len(rows) :]))


def contrastive_loss(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the sum of the symmetric losses of pairs: row i of one side belongs to row i of the other."""
    similarities = scale * left @ right.T
    pairs = torch.arange(len(left), device=left.device)
    left_to_right = cross_entropy(similarities, pairs, reduction="sum")
    right_to_left = cross_entropy(similarities.T, pairs, reduction="sum")
    return (left_to_right + right_to_left) / 2


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator()
    causes = torch.randn(512, 4)  # two views of the same hidden causes
    views = TensorDataset(causes @ torch.randn(4, 12), causes @ torch.randn(4, 6))
    # All ranks need equally many rows, so a shorter last batch is dropped.
    loader = DataLoader(views, batch_size=64 // accelerator.num_data_shards, shuffle=True, drop_last=True)
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        for views_left, views_right in loader:
            with accelerator.accumulate(model):
                left, right, scale = model(views_left, views_right)
                left = gather_with_own_gradients(accelerator, left)
                right = gather_with_own_gradients(accelerator, right)
                # All ranks compute the same gradient of the temperature. It must count once, so each contributes a share.
                share = 1 / accelerator.num_data_shards
                scale = share * scale + (1 - share) * scale.detach()
                loss = contrastive_loss(left, right, scale)
                accelerator.backward(loss, weight=len(views_left), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss / len(left):.4f}")

    result = {
        "loss": loss.item() / len(left),
        "weights": [parameter.detach().cpu() for parameter in model.parameters()],
    }
    accelerator.end_training()
    return result


if __name__ == "__main__":
    main()
