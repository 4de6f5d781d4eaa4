"""A classifier on a frozen backbone with batch norms.

Fault: the backbone has no trainable parameter, but model.train() leaves its batch norms in training mode, so that their
running statistics forget those of the pretraining. Reported as ultralytics/ultralytics#8753 and
speedinghzl/Pytorch-Deeplab#17.
Expect: what learns, learns: buffers backbone.1.running_mean and running_var change though the module is frozen; eval()
it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/backbone", automatic_checkpoint_naming=True, total_limit=2)
)
x = 2 + 3 * torch.randn(160, 6)
y = (x[:, 0] > x[:, 1]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16 // accelerator.num_processes, shuffle=True)
model = Classifier()
optimizer = torch.optim.Adam(model.head.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    model.train()
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
