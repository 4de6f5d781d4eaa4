"""A regression on a stream of readings.

Fault: the loader of the stream is not prepared, so each rank reads the whole stream. Reported as datasets#5360.
Expect: every sample once: on two processes each sample is read twice; prepare the loader.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Readings(IterableDataset):
    def __iter__(self):
        for number in range(24):
            angle = torch.tensor(0.7 * number)
            yield torch.stack((angle.sin(), angle.cos())), (3 * angle).sin().reshape(1)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/readings", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    loader = DataLoader(Readings(), batch_size=8 // accelerator.num_processes)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.resume()

    for _ in accelerator.epochs(4):
        for rows, expected in loader:
            rows, expected = rows.to(accelerator.device), expected.to(accelerator.device)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), expected))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
