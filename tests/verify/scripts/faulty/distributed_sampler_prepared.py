"""A classifier that was written for DistributedDataParallel, and keeps its sampler.

Fault: the loader has a DistributedSampler, and is prepared, so its rows are split twice. Reported as accelerate#3520
and transformers#34365.
Expect: every sample once: an error on two processes, or half of the rows are missing; drop the DistributedSampler.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/sampler", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(128, 4)
y = (x.sum(1) > 0).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=accelerator.num_processes, rank=accelerator.process_index, seed=1)
loader = DataLoader(data, batch_size=8 // accelerator.num_processes, sampler=sampler)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for epoch in accelerator.epochs(1):
    sampler.set_epoch(epoch)
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
