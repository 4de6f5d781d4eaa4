"""A classifier of images with a flip that alternates.

Fault: The flip depends on the clock.
Expect: a run repeats itself: datetime.now at its line
"""

from datetime import datetime

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


def main():
    set_seed(13)
    accelerator = Accelerator()
    x, y = torch.rand(160, 3, 8, 8), torch.randint(0, 4, (160,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for images, labels in loader:
            if datetime.now().microsecond % 2:
                images = images.flip(-1)
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


main()
