"""Regression with a loss function that torch.compile compiles.

Run: -n 2 --strategy fsdp

Fault: The standard deviation is that of the rank's rows.
Expect: same result under the layout: std at its line, statistic over the rows of one rank
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


@torch.compile(backend="aot_eager")
def compute_loss(predicted, expected):
    scale = expected.std() + 1e-3
    return ((predicted - expected) / scale).square().mean()


def main():
    set_seed(1)
    accelerator = Accelerator()
    x = torch.randn(128, 8)
    y = x[:, :1] * 3 + torch.randn(128, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, expected in loader:
            loss = compute_loss(model(rows), expected)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
