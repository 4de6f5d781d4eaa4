"""A classifier that trains its head first, and its body from the second epoch on.

Fault: the body is unfrozen after prepare(), but the optimizer was made of the parameters that were trainable at the
start; the body gets gradients and never learns. (With ddp, prepare() has also left it out of the exchange: an error.)
fastai#2133 explains why a new optimizer is needed.
Expect: what learns, learns: body.0.weight and .bias require gradients from update 4 on and belong to no optimizer.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/gradual", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(24, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Classifier()
model.body.requires_grad_(False)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for epoch in accelerator.epochs(4):
    if epoch >= 1:
        model.body.requires_grad_(True)
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
