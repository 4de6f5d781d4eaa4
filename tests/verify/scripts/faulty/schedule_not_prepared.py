"""A regression whose learning rate decays at each update.

Fault: the schedule is neither prepared nor registered; after a resume it starts over and overwrites the restored rate.
Reported as lightly-train#301, allennlp#1650 and accelerate#137.
Expect: resume is exact: the learning rate jumps back at the resume; LambdaLR is not part of the checkpoint.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/exponential", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
