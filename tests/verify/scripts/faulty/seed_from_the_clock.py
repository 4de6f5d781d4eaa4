"""A regression whose seed is "different for each experiment".

Fault: the seed is made from the time, and nothing keeps it, so no run can be repeated.
Expect: a run repeats itself: parameters differ before update 1; the script reads the clock for its seed (time.time).
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, broadcast_object_list, set_seed


def main():
    project = ProjectConfiguration("runs/experiment", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    seeds = [int(time.time() * 1000) % 2**31]
    broadcast_object_list(seeds)
    set_seed(seeds[0])
    x = torch.linspace(-1, 1, 80)[:, None]
    y = (3 * x).sin()
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
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
