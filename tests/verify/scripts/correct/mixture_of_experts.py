"""A small mixture of experts: each row goes to the two best of four experts, with a loss that balances the load.

The balance is computed over the whole global batch: the shares of all ranks are averaged before they are used.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Experts(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        gates = torch.zeros_like(shares).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        hidden = torch.einsum("bi,eij->bej", x, self.up).relu()
        outputs = torch.einsum("bej,ejk->bek", hidden, self.down)
        return x + torch.einsum("be,bek->bk", gates, outputs), shares, chosen


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.experts, self.head = nn.Linear(6, 8), Experts(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        hidden, shares, chosen = self.experts(self.inner(x))
        return self.head(hidden), shares, chosen


set_seed(5)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/experts", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(128, 6)
y = (x[:, :3] * x[:, 3:]).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=16 // accelerator.num_processes, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(2):
    for rows, labels in loader:
        with accelerator.accumulate(model):
            scores, shares, chosen = model(rows)
            load = torch.nn.functional.one_hot(chosen, 4).float().sum(1).mean(0)
            load = accelerator.reduce(load, "mean")
            balance = (load * shares.mean(0)).sum()
            accelerator.backward(torch.nn.functional.cross_entropy(scores, labels) + 0.01 * balance)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
