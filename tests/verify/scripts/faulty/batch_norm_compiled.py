"""A convolutional classifier that torch.compile compiles, on several processes.

Fault: The statistics of BatchNorm2d are those of the rank's rows.
Expect: same result on n processes: BatchNorm stem.1 without synchronization
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        return self.head(self.tail(self.stem(images)))


def main():
    set_seed(1)
    accelerator = Accelerator()
    images, labels = torch.rand(96, 3, 8, 8), torch.randint(0, 5, (96,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = torch.compile(Net(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, expected in loader:
            loss = F.cross_entropy(model(rows), expected)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
