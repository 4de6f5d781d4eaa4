"""A cosine schedule after a warm-up, counted in updates, and prepared with the optimizer."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

EPOCHS, WARMUP = 3, 4
BATCH, ROWS = 16, 64
UPDATES = EPOCHS * ROWS // BATCH

set_seed(0)
accelerator = Accelerator(
    scheduler_ticks="updates",
    project_config=ProjectConfiguration("runs/schedule", automatic_checkpoint_naming=True, total_limit=2),
)
x = torch.randn(ROWS, 4)
y = torch.stack((x.prod(1), x.sum(1)), 1)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)


def factor(update):
    if update < WARMUP:
        return (update + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (UPDATES - WARMUP)))


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.resume()

for _ in accelerator.epochs(EPOCHS):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
