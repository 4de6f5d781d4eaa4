"""A pooling classifier: a learned attention over the parts of each row.

Fault: the softmax of the attention runs over dimension 0, the batch, not over the parts of a row; rows share their
weights. Reported as PetrochukM/PyTorch-NLP#2.
Expect: nothing leaks: changing one row changes the losses of the others (and the number of processes the result).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.score, self.head = nn.Linear(4, 8), nn.Linear(4, 1), nn.Linear(8, 2)

    def forward(self, parts):
        weights = self.score(parts).softmax(dim=0)
        return self.head((weights * self.value(parts)).sum(1))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/pooling", automatic_checkpoint_naming=True, total_limit=2)
)
parts = torch.randn(80, 6, 4)
labels = (parts.amax((1, 2)) > 2).long()
loader = DataLoader(TensorDataset(parts, labels), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Pooling()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
