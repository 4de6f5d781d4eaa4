"""A classifier whose loss adds up the rows of a batch.

Fault: cross_entropy(reduction="sum") goes to backward() as if it were a mean, so the gradient grows with the local
batch.
Expect: same result on n processes: differs from update 1 on; the loss is a sum, to be named with reduction="sum",
weight=.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/summed", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 6)
y = (x[:, 0] + x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels, reduction="sum")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
