"""A transformer encoder with warmup, whose updates the schedule counts in rows.

Run: -n 2 --strategy fsdp

Fault: The warmup counts the rows of this rank only, so it lasts twice as long on two processes.
Expect: same result under the layout: learning rate differs, group lr line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


def main():
    set_seed(5)
    accelerator = Accelerator()
    x, y = torch.randn(160, 10, 16), torch.randint(0, 4, (160,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(160, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = 0
    for epoch in range(2):
        for rows, labels in loader:
            loss = F.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            seen += len(rows)
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, seen / 64)
            optimizer.step()
            optimizer.zero_grad()


main()
