"""A handwritten average of the weights, evaluated separately and registered for checkpoints."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Average:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.num_updates = 0
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 1 - decay)

    def state_dict(self):
        return {"num_updates": self.num_updates, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.num_updates = state["num_updates"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/average", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(64, 5)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
average = Average(model)
accelerator.register_for_checkpointing(average)
accelerator.resume()

for epoch in accelerator.epochs(2):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.update(model)
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
    with torch.no_grad():
        error = nn.functional.mse_loss(torch.func.functional_call(model, average.shadow, (x,)), y)
    accelerator.print(f"epoch {epoch}: error of the average {error.item():.3f}")
accelerator.end_training()
