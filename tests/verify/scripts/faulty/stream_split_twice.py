"""A stream that the script splits by rank itself, then prepared with Accelerate.

Run: --as accelerate

Fault: The stream yields this rank's part only, and prepare() splits it again.
Expect: every sample once: ranks gave different data, split twice
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        generator = torch.Generator().manual_seed(20)
        self.x = torch.randn(320, 6, generator=generator)

    def __iter__(self):
        for n in range(self.rank, len(self.x), self.world):
            yield self.x[n], self.x[n].sum().unsqueeze(0)


def main():
    set_seed(20)
    accelerator = Accelerator()
    stream = Stream(accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(stream, batch_size=8 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, expected in loader:
            loss = nn.functional.mse_loss(model(rows), expected)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
