"""A net with dropout under one seed: masks are random, but a repeated or resumed run draws the same ones."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(11)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/dropout", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 6)
y = x.abs().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(
    nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.1), nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

model.train()
for _ in accelerator.epochs(2):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.smooth_l1_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
