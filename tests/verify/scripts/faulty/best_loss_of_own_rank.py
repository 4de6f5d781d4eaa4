"""Training whose learning rate is halved when an average of the loss stops falling, sharded.

Run: -n 2 --strategy fsdp

Fault: Each rank compares the loss of its own rows, so learning rates differ between ranks.
Expect: same result under the layout: learning rates differ between ranks, group lr line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


def main():
    set_seed(19)
    accelerator = Accelerator()
    x = torch.randn(160, 8)
    y = x.sin().sum(1, keepdim=True) + torch.randn(160, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    best = float("inf")
    for epoch in range(2):
        for rows, expected in loader:
            loss = F.mse_loss(model(rows), expected)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if loss.item() < best:
                best = loss.item()
            else:
                for group in optimizer.param_groups:
                    group["lr"] /= 2


main()
