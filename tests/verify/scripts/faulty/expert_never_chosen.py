"""A mixture of four experts, stacked in one tensor, with a router that sends each row to one of them.

Fault: the router has one output too few, so the last expert never gets a row; its part of the tensor has zero
gradients.
Expect: what learns, learns: expert 3 of experts.up and experts.down is never used (the whole tensors do change).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

NUM_EXPERTS = 4


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS - 1)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, 16) / width**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 16, width) / 4)

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        hidden = torch.bmm(x[:, None], self.up[chosen]).relu()
        return x + weight[:, None] * torch.bmm(hidden, self.down[chosen])[:, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.head = Experts(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.experts(x))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/routed", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(320, 6)
y = (x[:, 0] * x[:, 1] > x[:, 2]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=32 // accelerator.num_processes, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
