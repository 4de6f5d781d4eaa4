"""A classifier that learns from the hardest half of each batch.

Fault: the half is chosen among this rank's rows; two ranks with four rows each choose other rows than one with eight.
Expect: same result on n processes: the loss differs at update 1 though samples and weights agree; topk over local rows.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/hardest", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
            hardest = losses.topk(len(losses) // 2).values
            accelerator.backward(hardest.mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
