"""A forecaster of series: a causal convolution predicts each next value.

Fault: each series is divided by its deviation over all its steps, the later ones included, so the early predictions
know how large the series will become. Reported as shiyu-coder/Kronos#228.
Expect: nothing leaks: changing step t changes the losses of steps before t; a mean and deviation over the whole series.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Conv1d(1, 8, 4), nn.Conv1d(8, 1, 1)

    def forward(self, series):
        return self.outer(self.inner(nn.functional.pad(series, (3, 0))).relu())


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/forecaster", automatic_checkpoint_naming=True, total_limit=2)
)
series = torch.randn(80, 1, 24).cumsum(-1)
loader = DataLoader(TensorDataset(series), batch_size=8 // accelerator.num_processes, shuffle=True)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (rows,) in loader:
        rows = (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, keepdim=True)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows[..., :-1]), rows[..., 1:]))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
