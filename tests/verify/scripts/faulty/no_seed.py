"""A regression without any seed.

Fault: nothing is seeded, so the weights and the order of the rows differ between runs.
Expect: a run repeats itself: parameters differ before update 1; call set_seed before the model is built.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration

accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/unseeded", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.linspace(-2, 2, 80)[:, None]
y = x.square()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
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
