"""A deep net whose output layer is drawn with a small deviation.

Run: -n 2 --strategy fsdp

Fault: torch.nn.init runs after prepare(); under fsdp each rank draws its shard from equal random numbers, so both
shards hold the same values.
Expect: same result under the layout: weights of 4.weight differ before update 1; initialize before prepare().
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/drawn", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 6)
y = torch.stack((x.sum(1), x.prod(1), x.amax(1), x.amin(1)), 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
torch.manual_seed(7)
with torch.no_grad():
    weight = model[4].weight
    (weight.to_local() if hasattr(weight, "to_local") else weight).normal_(std=0.02)
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
