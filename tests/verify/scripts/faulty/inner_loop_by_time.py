"""A regression that refines a vector for each batch before it trains, as energy models and meta-learning do.

Fault: the refinement goes on for three milliseconds, so its number of steps depends on how busy the machine is.
Expect: a run repeats itself: same samples and weights, another loss at update 1; the script reads the clock
(perf_counter).
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def refine(rows):
    """Return a direction of large variance, found by power iterations."""
    direction = torch.ones(rows.shape[1], device=rows.device)
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        direction = nn.functional.normalize(direction + 1e-3 * rows.T @ (rows @ direction), dim=0)
    return direction


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/refine", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(80, 6) * torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    loader = DataLoader(TensorDataset(x), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for (rows,) in loader:
            direction = refine(accelerator.gather(rows))
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), (rows @ direction)[:, None]))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
