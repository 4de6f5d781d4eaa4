"""A classifier that is evaluated after every update on a few rows.

Fault: the evaluation runs without torch.no_grad(), and its outputs are kept for a later report, each with the graph of
its forward pass.
Expect: memory: grows by about 4 MB with each update; outputs of an evaluation with gradients kept in a list.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/evaluated", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(704, 16)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=64 // accelerator.num_processes, shuffle=True)
test_x = x[640:].to(accelerator.device)
model = nn.Sequential(nn.Linear(16, 16384), nn.Tanh(), nn.Linear(16384, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

outputs = []
for _ in accelerator.epochs(1):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        outputs.append(accelerator.unwrap_model(model)(test_x))
        model.train()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.print(f"{len(outputs)} evaluations")
accelerator.end_training()
