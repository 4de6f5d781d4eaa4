"""A classifier whose rows are blurred by a random share, drawn once per update and equal on all ranks.

Fault: the shares are drawn from a random.Random of the script, whose state is not part of the checkpoint. A related
report is transformers#11323.
Expect: resume is exact: the samples agree, the loss does not; a random.Random outside the checkpoint.
"""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/blur", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4)
y = nn.functional.one_hot((x.sum(1) > 0).long(), 2).float()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

blur = random.Random(13)
for _ in accelerator.epochs(1):
    for rows, labels in loader:
        share = blur.betavariate(0.4, 0.4)
        rows = share * rows + (1 - share) * rows.mean(1, keepdim=True)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
