"""A regression with a low-rank adapter, written by hand, on a frozen layer, and a trained output.

Fault: both matrices of the adapter start at zero. Each one's gradient is a product with the other, so both stay zero.
Expect: what learns, learns: adapter.down and adapter.up get gradients of exactly zero, and stay as they are.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Adapter(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.down = nn.Parameter(torch.zeros(width, rank))
        self.up = nn.Parameter(torch.zeros(rank, width))

    def forward(self, x):
        return x @ self.down @ self.up


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.adapter, self.output = Adapter(6, 2), nn.Linear(6, 1)

    def forward(self, x):
        return self.output((self.base(x) + self.adapter(x)).tanh())


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/zeros", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 6)
y = x.sin().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Net()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
