"""A regression with ReduceLROnPlateau, stepped by the loss of each update.

Fault: each rank passes the loss of its own rows to schedule.step(), so the ranks reduce their rates at different
updates.
Expect: same result on n processes: an error on two processes, or rates that differ between ranks; reduce the loss
first.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(2)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/plateau", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True) + torch.randn(96, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(loss.item())
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
