"""A regression with Adam that can be restarted with another learning rate.

Fault: after resume() the script empties the optimizer's state and writes the rate of the command line into it, so that the
rate takes effect; Adam's moments start at zero in a resumed run.
Expect: resume is exact: parameters differ in the first update after the resume; the state of Adam is emptied after resume().
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

RATE = 0.02


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/adam", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(80, 4)
    y = x.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.resume() is not None:
        optimizer.optimizer.state.clear()
        optimizer.optimizer.param_groups[0]["lr"] = RATE

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
