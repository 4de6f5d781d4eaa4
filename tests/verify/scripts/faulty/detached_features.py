"""Two-tower model; the features of the second tower are cached.

Run: -n 2 --strategy fsdp

Fault: The second tower runs under no_grad, so it never learns.
Expect: what learns, learns: item.weight got no gradient; computed under no_grad, item line
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = nn.Linear(8, 16), nn.Linear(6, 16)
        self.score = nn.Linear(32, 1)

    def forward(self, query, item):
        q = self.query(query).relu()
        with torch.no_grad():
            i = self.item(item).relu()
        return self.score(torch.cat([q, i], -1))


def main():
    set_seed(16)
    accelerator = Accelerator()
    q, i, y = torch.randn(160, 8), torch.randn(160, 6), torch.rand(160, 1)
    loader = DataLoader(TensorDataset(q, i, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for queries, items, expected in loader:
            loss = F.binary_cross_entropy_with_logits(model(queries, items), expected)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
