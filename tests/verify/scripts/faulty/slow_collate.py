"""A classifier of small images, which the collate function blurs.

Fault: the collate function blurs pixel by pixel in Python, in the main process; the model waits for it.
Expect: data keeps up: most of an update is spent waiting for data, in collate_fn (blur); vectorize it or use workers.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed

SIZE = 16


def blur(image):
    pixels = image.tolist()
    result = [[0.0] * SIZE for _ in range(SIZE)]
    for row in range(SIZE):
        for column in range(SIZE):
            near = [
                pixels[r][c]
                for r in range(max(0, row - 2), min(SIZE, row + 3))
                for c in range(max(0, column - 2), min(SIZE, column + 3))
            ]
            result[row][column] = sum(sorted(near)[1:-1]) / (len(near) - 2)
    return torch.tensor(result)


def collate(rows):
    return torch.stack([blur(image) for image, _ in rows]).flatten(1), torch.tensor([label for _, label in rows])


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/blurred", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    images = torch.rand(160, SIZE, SIZE)
    rows = [(image, int(image[:8].mean() > image[8:].mean())) for image in images]
    loader = DataLoader(rows, batch_size=16 // accelerator.num_processes, shuffle=True, collate_fn=collate)
    model = nn.Linear(SIZE * SIZE, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
