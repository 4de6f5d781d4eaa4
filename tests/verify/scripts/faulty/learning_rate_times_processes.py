"""A regression with a fixed global batch.

Fault: the learning rate is multiplied by the number of processes, though the global batch does not grow with it.
Accelerate's guide on performance suggests the line (accelerate#1013).
Expect: same result on n processes: the first loss is equal, the first step is not; the learning rates differ (0.02,
0.04).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

GLOBAL_BATCH = 16

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/rate", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(128, 5)
y = x @ torch.randn(5, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
model = nn.Linear(5, 1)
learning_rate = 0.02 * accelerator.num_processes
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
