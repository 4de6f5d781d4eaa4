"""A regression with a plain loop: one model, one optimizer, a shuffled table in memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
project = ProjectConfiguration("runs/plain_loop", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(project_config=project)

inputs = torch.randn(64, 5)
targets = inputs @ torch.randn(5, 2) + 0.1 * torch.randn(64, 2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for epoch in accelerator.epochs(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
    accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
accelerator.end_training()
