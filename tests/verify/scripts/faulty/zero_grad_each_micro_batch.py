"""Accumulation by hand over two micro-batches.

Fault: zero_grad() runs before each micro-batch, so the gradients of every first micro-batch are lost.
Expect: what learns, learns: gradients of a backward are discarded by zero_grad, its line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


def main():
    set_seed(15)
    accelerator = Accelerator()
    x = torch.randn(192, 10)
    y = x @ torch.randn(10, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for index, (rows, expected) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(rows), expected) / 2
            accelerator.backward(loss)
            if (index + 1) % 2 == 0:
                optimizer.step()


main()
