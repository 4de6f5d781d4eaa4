"""A registered stream that keeps its own position, so that a resumed run continues where it stopped."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class SensorLog(IterableDataset):
    """Readings computed from their number, as from a file that is read line by line."""

    def __init__(self, num_readings):
        self.num_readings = num_readings
        self.position = 0

    def __iter__(self):
        while self.position < self.num_readings:
            number = self.position
            self.position += 1
            phase = torch.tensor([number * 0.37, number * 0.11, number * 0.05])
            yield phase.sin(), phase.cos().sum().reshape(1)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/stream", automatic_checkpoint_naming=True, total_limit=2)
)
log = SensorLog(48)
model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(log, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(log)
accelerator.resume()

for _ in accelerator.epochs(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
