"""A regression on a large table, of which each process loads its own part to save memory.

Fault: the part of the rank is given to prepare(), which splits it again; most rows are never read. Reported as
accelerate#4199 and #4062.
Expect: every sample once: an error on two processes, or half of the rows are missing; the data is already sharded.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/parts", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(128, 4)
y = x.sum(1, keepdim=True)
part = slice(accelerator.process_index, None, accelerator.num_processes)
loader = DataLoader(TensorDataset(x[part], y[part]), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
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
