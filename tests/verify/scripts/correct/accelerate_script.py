"""A script for Accelerate without Headway: accumulation, a schedule, save_state and load_state.

Run: --as accelerate
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path("runs/accelerate_script")


class Progress:
    """The number of batches read so far, as part of the checkpoint."""

    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def main():
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=ProjectConfiguration(str(FOLDER)))
    points = torch.rand(96, 2) * 2 - 1
    inside = (points.norm(dim=1) < 0.75).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(points, inside), batch_size=4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * len(loader) // 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = sorted(FOLDER.glob("batch_*"), key=lambda folder: int(folder.name.split("_")[1]))
    if saved:
        accelerator.load_state(str(saved[-1]))

    for epoch in range(progress.batches // len(loader), 2):
        done = progress.batches - epoch * len(loader)
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.batches += 1
            if progress.batches % 4 == 0:
                accelerator.save_state(str(FOLDER / f"batch_{progress.batches}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
