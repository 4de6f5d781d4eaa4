"""Masked autoencoder whose mask ratio grows during training, with checkpoints.

Fault: The curriculum's counter is not registered for checkpointing, so it restarts at 0 after a resume.
Expect: resume is exact: curriculum.step (or hidden) differs after the resume; register_for_checkpointing
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, set_seed


class Curriculum:
    """The share of hidden features, which grows from 10 % to 60 %."""

    def __init__(self, steps):
        self.steps, self.step = steps, 0

    @property
    def ratio(self):
        return 0.1 + 0.5 * min(1.0, self.step / self.steps)


def main():
    set_seed(12)
    accelerator = Accelerator(project_config=ProjectConfiguration("runs/mae", automatic_checkpoint_naming=True))
    x = torch.randn(160, 20)
    loader = DataLoader(x, batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    curriculum = Curriculum(20)
    accelerator.resume("latest")
    for epoch in accelerator.epochs(2):
        for rows in loader:
            hidden = int(20 * curriculum.ratio)
            mask = torch.arange(20) < hidden
            loss = F.mse_loss(model(rows.masked_fill(mask, 0.0))[:, mask], rows[:, mask])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curriculum.step += 2
        accelerator.save_state()


main()
