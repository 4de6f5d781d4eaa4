"""A regression with a fixed number of updates in each epoch, fewer than the loader has batches.

Fault: the loop breaks after five batches by its own count, and a resumed epoch starts to count at 0 again, so that it
makes more updates than the undisturbed one.
Expect: resume is exact: the resumed epoch trains on batches that the undisturbed run never reads; a loop's own counter.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

STEPS_PER_EPOCH = 5

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/steps", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = x.abs().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for step, (rows, targets) in enumerate(loader):
        if step == STEPS_PER_EPOCH:
            break
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
