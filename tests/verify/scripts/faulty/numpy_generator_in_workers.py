"""Images with random crops, read by worker processes.

Fault: the dataset holds a numpy Generator, of which every worker has its own copy; its state is lost with the workers,
and each worker draws the same numbers. Reported as pytorch#5059 and fairseq#1383.
Expect: resume is exact: same samples by index, other pixels after the resume; Crops.generator in num_workers=2.
"""

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Crops(Dataset):
    def __init__(self, num_images):
        self.images = torch.rand(num_images, 8, 8, generator=torch.Generator().manual_seed(1))
        self.generator = numpy.random.default_rng(3)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left = self.generator.integers(0, 3, 2)
        image = self.images[index]
        return image[top : top + 6, left : left + 6].flatten(), (image.mean() > 0.5).long()


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/crops", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    loader = DataLoader(Crops(96), batch_size=8 // accelerator.num_processes, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
