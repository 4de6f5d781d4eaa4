"""Images that are flipped and shifted at random in two worker processes; each process gets whole batches.

The batch size is that of one process, so two processes make updates of twice as many rows.
"""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


class Images(Dataset):
    def __init__(self, num_images):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(num_images, 1, 6, 6, generator=generator)
        self.labels = (self.images[:, 0, :3].mean((1, 2)) > self.images[:, 0, 3:].mean((1, 2))).long()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        return image.roll(int(torch.randint(0, 6, ())), -1), self.labels[index]


def main():
    set_seed(0)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(data_seed=3),
        project_config=ProjectConfiguration("runs/augmentation", automatic_checkpoint_naming=True, total_limit=2),
    )
    loader = DataLoader(Images(96), batch_size=6, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(2):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
