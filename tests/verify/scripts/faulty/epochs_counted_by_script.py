"""A classifier with a curriculum: the noise on its rows falls from epoch to epoch.

Fault: the loop is range(4) in place of accelerator.epochs(4), so a resumed run counts its epochs from 0 again, with the
noise of epoch 0 in the middle of epoch 2. Reported as facebookresearch/fairchem#146.
Expect: resume is exact: the resumed run ends with an error that asks for accelerator.epochs (or has another loss).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/curriculum", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(16, 4)
noise = torch.randn(16, 4)
y = (x[:, 0] > x[:, 1]).long()
loader = DataLoader(TensorDataset(x, noise, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for epoch in range(4):
    level = 1.0 - epoch / 4
    for rows, disturbance, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows + level * disturbance), labels))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
accelerator.end_training()
