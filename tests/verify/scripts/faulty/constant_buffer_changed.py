"""A regression that normalizes its inputs by constants, which were measured once and are kept in buffers.

Fault: "deviation += 1e-2" was meant for this call, but adds to the buffer in place, so the constant grows at each
forward.
Expect: what learns, learns: buffer deviation changes, though nothing trains it; an in-place addition in forward.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Net(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.register_buffer("mean", data.mean(0))
        self.register_buffer("deviation", data.std(0))
        self.body = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        deviation = self.deviation
        deviation += 1e-2  # no division by zero
        return self.body((x - self.mean) / deviation)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/constants", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4) * torch.tensor([0.1, 1.0, 2.0, 0.5])
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Net(x)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
