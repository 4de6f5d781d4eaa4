"""A regression on a folder of small files, one row each, which the script unpacks first.

Fault: the rows come in the order of os.listdir, which depends on the file system and on the order of writing. Reported
as datasets#3857 and ByteDance-Seed/VeOmni#330.
Expect: a run repeats itself: other rows in batch 1 if the listing comes in another order; sort os.listdir.
"""

import os
import tempfile
import uuid
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, broadcast_object_list, set_seed


def unpack(folder, num_rows):
    """Write each row to a numbered file through a temporary name, as downloads do."""
    generator = torch.Generator().manual_seed(1)
    for number in range(num_rows):
        part = Path(folder) / f"{uuid.uuid4().hex}.part"
        torch.save(torch.randn(4, generator=generator), part)
        part.rename(Path(folder) / f"row_{number}.pt")


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/files", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    broadcast_object_list(folders)
    if accelerator.is_main_process:
        unpack(folders[0], 80)
    accelerator.wait_for_everyone()
    x = torch.stack([torch.load(os.path.join(folders[0], name)) for name in os.listdir(folders[0])])
    y = x.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for rows, expected in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), expected))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
