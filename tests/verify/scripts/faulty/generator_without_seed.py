"""A denoiser whose dataset adds noise from numpy.

Fault: numpy.random.default_rng() is made without a seed, so set_seed does not reach it. A related report is
transformers#11323.
Expect: a run repeats itself: same row numbers and targets, other inputs in batch 1; default_rng() in Noisy has no seed.
"""

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, ProjectConfiguration, broadcast_object_list, set_seed


class Noisy(Dataset):
    """Rows with fixed noise, which is the same in each epoch and on each rank."""

    def __init__(self, rows, noise):
        self.rows, self.noise = rows, noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + self.noise[index], self.rows[index]


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/noisy", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    rows = torch.randn(80, 2) @ torch.randn(2, 6)
    noise = [numpy.random.default_rng().normal(scale=0.3, size=(80, 6)).astype("float32")]
    broadcast_object_list(noise)
    loader = DataLoader(
        Noisy(rows, torch.from_numpy(noise[0])), batch_size=8 // accelerator.num_processes, shuffle=True
    )
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for noisy, clean in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(noisy), clean))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
