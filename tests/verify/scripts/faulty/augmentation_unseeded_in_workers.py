"""A classifier with random crops that loader workers draw.

Fault: Each item draws from a generator without a seed, in a worker.
Expect: a run repeats itself: RandomState() without a seed at its line
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, set_seed


class Crops(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, n):
        rng = np.random.RandomState()
        top, left = rng.randint(0, 3, 2)
        return self.images[n, :, top : top + 8, left : left + 8], self.labels[n]


def main():
    set_seed(18)
    accelerator = Accelerator()
    data = Crops(torch.rand(160, 3, 10, 10), torch.randint(0, 4, (160,)))
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
