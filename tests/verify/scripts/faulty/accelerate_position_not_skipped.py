"""A script for Accelerate that saves every two updates and resumes, without a line of Headway.

Run: --as accelerate

Fault: load_state restores model, optimizer and random numbers, but the loop begins its epoch at the first batch again, as
skip_first_batches is not called. A related report is NguyenJus/custom-sam-peft#308.
Expect: resume is exact: the samples after the resume are those of update 1; accelerator.skip_first_batches.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path("runs/not_skipped")


def main():
    set_seed(0)
    accelerator = Accelerator()
    x = torch.rand(96, 2) * 2 - 1
    y = (x.norm(dim=1) < 0.75).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved = sorted(FOLDER.glob("update_*"), key=lambda folder: int(folder.name.split("_")[1]))
    updates = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        updates = int(saved[-1].name.split("_")[1])

    for _ in range(updates // len(loader), 1):
        for rows, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if updates % 2 == 0:
                accelerator.save_state(str(FOLDER / f"update_{updates}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
