"""A classifier whose pretrained encoder is frozen by name.

Fault: the name "encoder" also matches encoder_head, so the new head is frozen, too, though the optimizer was given it.
Expect: what learns, learns: encoder_head.weight and .bias are given to the optimizer, but have requires_grad=False.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.adapter = nn.Linear(16, 16)
        self.encoder_head = nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.encoder(x)
        return self.encoder_head(hidden + self.adapter(hidden))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/frozen", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Classifier()
for name, parameter in model.named_parameters():
    if name.startswith("encoder"):
        parameter.requires_grad = False
optimizer = torch.optim.Adam([*model.adapter.parameters(), *model.encoder_head.parameters()], lr=0.02)
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
