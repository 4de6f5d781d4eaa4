"""A regression that keeps the losses of all updates for a plot.

Fault: the list holds loss tensors with their graphs, and retain_graph=True keeps all activations in them. Reported as
google/brax#152 and BatsResearch/labelmodels#4.
Expect: memory: grows by about 4 MB with each update; losses kept in a list, use loss.item() or detach().
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/history", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(640, 16)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=64 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(16, 16384), nn.Tanh(), nn.Linear(16384, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

history = []
for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        history.append(loss)
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.print(f"first and last loss: {history[0].item():.3f}, {history[-1].item():.3f}" if history else "done")
accelerator.end_training()
