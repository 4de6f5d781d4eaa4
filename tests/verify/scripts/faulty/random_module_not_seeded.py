"""A classifier on sequences that are reversed at random.

Fault: torch is seeded, but the choice comes from Python's random module, which is not. Reported as pytorch#7882.
Expect: a run repeats itself: same weights and row numbers, other inputs in batch 1; random in Sequences.__getitem__.
"""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration


class Sequences(Dataset):
    def __init__(self, num_rows):
        self.rows = torch.randn(num_rows, 6)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        label = (row[0] > 0).long()
        return (row.flip(0) if random.random() < 0.5 else row), label


torch.manual_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/reversed", automatic_checkpoint_naming=True, total_limit=2)
)
loader = DataLoader(Sequences(80), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
