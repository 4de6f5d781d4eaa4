"""A regression on a stream that is read by two worker processes.

Fault: the stream does not look at get_worker_info(), so each worker yields all rows, and each row is trained on twice.
Reported as datasets#3423.
Expect: every sample once: duplicates on one process, too; two workers with num_workers=2 read the same rows.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Lines(IterableDataset):
    def __iter__(self):
        for number in range(48):
            row = torch.tensor([number % 5, number % 7, number % 3], dtype=torch.float32)
            yield row, row.sum().reshape(1)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/lines", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    loader = DataLoader(Lines(), batch_size=8 // accelerator.num_processes, num_workers=2)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
