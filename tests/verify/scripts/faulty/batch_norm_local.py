"""A convolutional net with batch norms on small batches.

Fault: BatchNorm2d takes the mean and the variance of this rank's rows alone, and nothing synchronizes them. Reported as
pytorch#12198.
Expect: same result on n processes: the batch norms (1 and 4) lack a synchronization; SyncBatchNorm or GroupNorm.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/norms", automatic_checkpoint_naming=True, total_limit=2)
)
images = torch.rand(80, 1, 8, 8)
labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Conv2d(4, 8, 3, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for batch, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
