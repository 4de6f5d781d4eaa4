"""A net with two inputs, each with its own encoder.

Fault: the codes of the second encoder pass through numpy on their way to the head, which cuts them off from the graph.
Expect: what learns, learns: second.* get no gradient (an error on two processes, where they took no part); a detached
branch.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, first, second):
        codes = self.second(second)
        rounded = torch.from_numpy(codes.detach().cpu().numpy().round(3)).to(codes.device)
        return self.head(torch.cat((self.first(first), rounded), 1))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/inputs", automatic_checkpoint_naming=True, total_limit=2)
)
a, b = torch.randn(80, 4), torch.randn(80, 3)
y = a.sum(1, keepdim=True) * b.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(a, b, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = TwoInputs()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for first, second, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(first, second), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
