"""A classifier with a linear decay to zero over its whole training.

Fault: the length of the schedule is computed from the prepared loader, but each update makes one tick per process, so
on two processes the rate is zero in the middle of the run. Reported as accelerate#2142 and
Lightricks/LTX-Video-Trainer#67.
Expect: same result on n processes: learning rates differ from update 2 on; scheduler_ticks="updates", or length x
processes.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

EPOCHS = 2


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/decay", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(64, 3)
    y = (x[:, 0] > x[:, 2]).long()
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_updates = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: max(0.0, 1 - tick / num_updates))
    schedule = accelerator.prepare(schedule)
    accelerator.resume()

    for _ in accelerator.epochs(EPOCHS):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
