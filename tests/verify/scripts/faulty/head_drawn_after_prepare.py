"""A classifier that is fine-tuned with a new head.

Fault: the head is drawn again after prepare(), from a seed that contains the rank, so replicas start with different
heads.
Expect: same result on n processes: an error on two processes about a parameter changed in place; replicas differ
(2.weight).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/head", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 5)
y = x.abs().argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
drawn = torch.Generator().manual_seed(accelerator.process_index)
nn.init.normal_(model[2].weight, std=0.02, generator=drawn)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
