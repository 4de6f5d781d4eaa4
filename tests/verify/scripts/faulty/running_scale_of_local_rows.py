"""A regression whose inputs are divided by a running scale, kept in a buffer.

Fault: the scale is updated from this rank's rows, and used in the same forward pass; the ranks have different scales.
Expect: same result on n processes: buffer scale.value differs, and with it the loss; it needs the rows of all ranks.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class RunningScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("value", torch.ones(width))

    def forward(self, x):
        if self.training:
            self.value.lerp_(x.detach().abs().amax(0), 0.3)
        return x / self.value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.body = RunningScale(4), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(self.scale(x))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/scale", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4) * torch.tensor([1.0, 5.0, 20.0, 0.1])
y = (x / torch.tensor([1.0, 5.0, 20.0, 0.1])).sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Net()
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
