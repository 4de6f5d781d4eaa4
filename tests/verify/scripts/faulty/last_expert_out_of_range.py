"""A mixture of experts with top-2 routing, stacked weights.

Fault: The loop leaves out the last expert.
Expect: what learns, learns: expert 3 of experts.up gets no gradient
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.1)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for expert in range(self.count - 1):
            rows, slot = torch.where(chosen == expert)
            y = (x[rows] @ self.up[expert]).relu() @ self.down[expert]
            out = out.index_add(0, rows, y * weights[rows, slot, None])
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.experts, self.head = nn.Linear(8, 16), Experts(16, 4), nn.Linear(16, 3)

    def forward(self, x):
        h = self.inp(x).tanh()
        return self.head(h + self.experts(h))


def main():
    set_seed(17)
    accelerator = Accelerator()
    x, y = torch.randn(320, 8), torch.randint(0, 3, (320,))
    loader = DataLoader(TensorDataset(x, y), batch_size=32 // accelerator.num_processes, shuffle=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, labels in loader:
            loss = F.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
