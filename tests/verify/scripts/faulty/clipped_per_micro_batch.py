"""Accelerate script with own accumulation of gradients and clipping.

Run: --as accelerate

Fault: The clip runs after each micro-batch, on gradients that are not yet summed over ranks.
Expect: same result on n processes: clip before gradients are synchronized, clip line
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(2)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    x = torch.randn(192, 12)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()


main()
