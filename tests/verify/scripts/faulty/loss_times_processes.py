"""A script moved from Accelerate, whose loss is scaled by hand.

Fault: the loss is multiplied by the number of processes, to undo an average that Headway does not make that way. The
line comes from Accelerate's example for autoregressive models (asked about in accelerate#3661).
Expect: same result on n processes: loss and gradient are n times too large; leave num_processes out of the loss.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/scaled", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(rows), targets)
            loss = loss * accelerator.num_processes
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
