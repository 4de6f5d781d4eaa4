"""A regression that halves its learning rate when the loss stops falling.

Fault: the loss that decides is that of the main process's own rows, broadcast to the others; on one process it is that
of the whole batch. A related report is Lightning-AI/pytorch-lightning#379.
Expect: same result on n processes: learning rates diverge after some updates; the metric is computed on one rank, reduce
it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, broadcast, set_seed


class Patience:
    """The best loss so far, and the number of updates without an improvement."""

    def __init__(self):
        self.best = float("inf")
        self.misses = 0

    def is_over(self, loss):
        self.misses = 0 if loss < self.best else self.misses + 1
        self.best = min(self.best, loss)
        return self.misses > 0

    def state_dict(self):
        return {"best": self.best, "misses": self.misses}

    def load_state_dict(self, state):
        self.best, self.misses = state["best"], state["misses"]


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/patience", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True) + torch.randn(96, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
patience = Patience()
accelerator.register_for_checkpointing(patience)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen = broadcast(loss.detach().clone(), from_process=0).item()
        if patience.is_over(seen):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
