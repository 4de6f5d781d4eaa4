"""A compiled convolutional classifier with group norm and a compiled loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


@torch.compile(backend="aot_eager")
def compute_loss(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def main():
    set_seed(1)
    accelerator = Accelerator()
    images, labels = torch.rand(96, 3, 8, 8), torch.randint(0, 5, (96,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )
    model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, expected in loader:
            accelerator.backward(compute_loss(model(rows), expected))
            optimizer.step()
            optimizer.zero_grad()


main()
