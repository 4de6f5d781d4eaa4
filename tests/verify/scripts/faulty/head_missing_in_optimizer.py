"""A classifier with a body and a head.

Fault: the optimizer gets the parameters of the body alone. The head receives gradients, and is never changed. Reported
for a position embedding as DocF/multispectral-object-detection#77.
Expect: what learns, learns: head.weight and head.bias have gradients, but belong to no optimizer.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/body", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Classifier()
optimizer = torch.optim.AdamW(model.body.parameters(), lr=0.01)
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
