"""A regression with a random split into training and validation data.

Fault: random_split has no generator, and the seed before it contains the rank, so each rank trains on other rows, and
validates on rows that the other trains on. Reported as TensorAuto/OpenTau#498.
Expect: every sample once: an error on two processes, or rows that differ; give random_split a generator with one seed.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from headway import Accelerator, ProjectConfiguration, set_seed

generator = torch.Generator().manual_seed(0)
x = torch.randn(110, 4, generator=generator)
y = x.sum(1, keepdim=True) + 0.1 * torch.randn(110, 1, generator=generator)

accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/split", automatic_checkpoint_naming=True, total_limit=2)
)
set_seed(5 + accelerator.process_index)
train, validation = random_split(TensorDataset(x, y), [80, 30])
train_loader = DataLoader(train, batch_size=8 // accelerator.num_processes, shuffle=True)
validation_loader = DataLoader(validation, batch_size=8)
set_seed(5)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, train_loader, validation_loader = accelerator.prepare(
    model, optimizer, train_loader, validation_loader
)
accelerator.resume()

for epoch in accelerator.epochs(1):
    for rows, targets in train_loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
    with torch.no_grad():
        errors = [accelerator.gather_for_metrics((model(a) - b).square()) for a, b in validation_loader]
    accelerator.print(f"epoch {epoch}: error {torch.cat(errors).mean():.3f}")
accelerator.end_training()
