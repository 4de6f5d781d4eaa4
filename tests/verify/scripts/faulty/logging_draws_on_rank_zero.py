"""A residual network with stochastic depth: one choice of blocks for all ranks and rows.

Fault: The main process draws one more number for its log, so the ranks' generators diverge and drop different blocks.
Expect: same result on n processes: random drawn under is_main_process, random.randrange line
"""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(12, 3)

    def forward(self, x, keep):
        for block, kept in zip(self.blocks, keep):
            x = x + block(x) * kept
        return self.head(x)


def main():
    set_seed(21)
    random.seed(21)
    accelerator = Accelerator()
    x, y = torch.randn(160, 12), torch.randint(0, 3, (160,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for step, (rows, labels) in enumerate(loader):
            keep = [float(random.random() < 0.7) for _ in range(6)]
            logits = model(rows, keep)
            loss = F.cross_entropy(logits, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                n = random.randrange(len(rows))
                print(f"step {step}: example {logits[n].argmax().item()} expected {labels[n].item()}")


main()
