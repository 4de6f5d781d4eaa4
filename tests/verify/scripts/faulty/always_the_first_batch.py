"""A regression that counts updates instead of epochs.

Fault: next(iter(loader)) in each update begins a new pass, so only the first batch of each pass is ever read.
Expect: every sample once: rows come again before all were read (the loader is unshuffled); make one iterator and keep
it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/updates", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 3)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

while accelerator.num_updates < 10:
    rows, targets = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(rows), targets))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.num_updates % 2 == 0:
        accelerator.save_state()
accelerator.end_training()
