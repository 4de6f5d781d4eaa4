"""A regression that looks at its activations with a forward hook.

Fault: the hook is registered in each update and never removed, so each update runs one hook more, and each keeps a
copy.
Expect: memory: grows with each update, and faster each time (hooks on module 0 add up); remove the handle.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/hooks", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(640, 8)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=64 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

seen = []
for _ in accelerator.epochs(1):
    for rows, targets in loader:
        model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.print(f"{len(seen)} activations of {accelerator.num_updates} updates")
accelerator.end_training()
