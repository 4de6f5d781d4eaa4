"""A regression that cuts its batches from one tensor by itself, without a DataLoader.

Fault: the position in the data follows a counter of the script; a resumed run reads from the first row again.
Expect: resume is exact: the samples after the resume are those of update 1; the position is not in the checkpoint.
"""

import torch
from torch import nn

from headway import Accelerator, ProjectConfiguration, set_seed

BATCH, UPDATES = 8, 12

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/tensor", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(BATCH * UPDATES, 4).to(accelerator.device)
y = x.prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.resume()

share = BATCH // accelerator.num_processes
position = 0
while accelerator.num_updates < UPDATES:
    first = position + accelerator.process_index * share
    rows, targets = x[first : first + share], y[first : first + share]
    position = (position + BATCH) % len(x)
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(rows), targets), weight=share)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.num_updates % 2 == 0:
        accelerator.save_state()
accelerator.end_training()
