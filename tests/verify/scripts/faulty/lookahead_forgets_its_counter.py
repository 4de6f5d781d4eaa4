"""A regression with lookahead: every three updates, the weights move halfway back to slow weights.

Fault: the registered object saves its slow weights, but not the count of updates since they were last moved.
Expect: resume is exact: equal for one or two updates, then different; the state_dict lacks Lookahead.since.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Lookahead:
    def __init__(self, model, every=3):
        self.parameters = list(model.parameters())
        self.slow = [parameter.detach().clone() for parameter in self.parameters]
        self.every = every
        self.since = 0

    @torch.no_grad()
    def step(self):
        self.since += 1
        if self.since == self.every:
            self.since = 0
            for slow, fast in zip(self.slow, self.parameters):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def state_dict(self):
        return {"slow": self.slow, "every": self.every}

    def load_state_dict(self, state):
        self.every = state["every"]
        for slow, saved in zip(self.slow, state["slow"]):
            slow.copy_(saved)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/lookahead", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = x.sin().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
lookahead = Lookahead(model)
accelerator.register_for_checkpointing(lookahead)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        lookahead.step()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
