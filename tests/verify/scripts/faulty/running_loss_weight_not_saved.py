"""A net with two tasks, whose losses are divided by their running means so that neither dominates.

Fault: the running means live in a dict of the script and are not part of the checkpoint. They restart in a resumed
run.
Expect: resume is exact: samples and parameters agree at the resume, the loss does not; a float outside the checkpoint.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.size, self.kind = nn.Linear(5, 16), nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.size(hidden), self.kind(hidden)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/tasks", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 5)
sizes = 30 * x.sum(1, keepdim=True)
kinds = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, sizes, kinds), batch_size=8 // accelerator.num_processes, shuffle=True)
model = TwoTasks()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

means = {"size": 1.0, "kind": 1.0}
for _ in accelerator.epochs(1):
    for rows, size, kind in loader:
        with accelerator.accumulate(model):
            size_answer, kind_answer = model(rows)
            losses = {
                "size": nn.functional.mse_loss(size_answer, size),
                "kind": nn.functional.cross_entropy(kind_answer, kind),
            }
            accelerator.backward(sum(losses[name] / means[name] for name in losses))
            optimizer.step()
            optimizer.zero_grad()
        for name, loss in losses.items():
            mean = accelerator.reduce(loss.detach(), "mean").item()
            means[name] = 0.8 * means[name] + 0.2 * mean
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
