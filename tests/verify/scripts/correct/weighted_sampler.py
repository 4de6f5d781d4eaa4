"""A classifier on unbalanced classes with a WeightedRandomSampler, which draws rare rows more often, by design."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/weighted", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(100, 4)
y = (x[:, 0] > 1).long()
weights = (1.0 / torch.bincount(y))[y]
sampler = WeightedRandomSampler(weights, num_samples=80, generator=torch.Generator().manual_seed(7))
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
