"""A regression with an average of the weights, which is evaluated and written at the end, and used nowhere else.

Fault: the average is not part of the checkpoint, so the weights that the run delivers are wrong after a resume, while
the losses are right. Reported as ai2cm/ace#349 and m2lines/Samudra#282.
Expect: resume is exact: loss and parameters agree, the model behind runs/delivered does not; a model that is not saved.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/delivered", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4)
y = x.square().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).to(accelerator.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
    with torch.no_grad():
        error = nn.functional.mse_loss(average(x.to(accelerator.device)), y.to(accelerator.device))
    accelerator.print(f"error of the average: {error.item():.4f}")
accelerator.save_model(average.module, "runs/delivered/weights")
accelerator.end_training()
