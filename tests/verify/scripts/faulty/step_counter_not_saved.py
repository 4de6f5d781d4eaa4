"""A classifier with a warm-up that is written by hand into the optimizer's groups.

Fault: the warm-up follows a counter of the script, which starts at 0 again in a resumed run. Reported as
aqlaboratory/openfold#182 and The-School-of-AI/LLM#560.
Expect: resume is exact: the learning rate after the resume is that of update 1; a counter outside the checkpoint.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

BASE_RATE, WARMUP = 0.2, 10

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/warmup", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = (x[:, 0] > x[:, 3]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=BASE_RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

step = 0
for _ in accelerator.epochs(1):
    for rows, labels in loader:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = BASE_RATE * min(1.0, step / WARMUP)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
