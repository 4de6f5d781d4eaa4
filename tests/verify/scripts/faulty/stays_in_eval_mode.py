"""A classifier with batch norm and an evaluation every two updates.

Fault: evaluate() leaves the model in evaluation mode, so dropout is off from update 3 on.
Expect: what learns, learns: model trains in evaluation mode from update 3 on; model.eval() line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    return (model(x).argmax(-1) == y).float().mean().item()


def main():
    set_seed(14)
    accelerator = Accelerator()
    x, y = torch.randn(160, 10), torch.randint(0, 3, (160,))
    loader = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    model.train()
    for epoch in range(2):
        for rows, labels in loader:
            loss = F.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 2 == 0:
                accelerator.print(f"accuracy {evaluate(model, x[128:], y[128:]):.2f}")


main()
