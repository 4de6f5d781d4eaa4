"""Value learning that mixes each batch with older rows from a replay buffer.

Fault: the buffer is not registered for checkpoints; a resumed run learns from an empty one. Reported as
stable-baselines3#1016 and ray#8151.
Expect: resume is exact: other rows in the first updates after the resume; the deque is outside the checkpoint.
"""

from collections import deque

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/values", automatic_checkpoint_naming=True, total_limit=2)
)
states = torch.randn(80, 3)
values = states.prod(1, keepdim=True)
loader = DataLoader(TensorDataset(states, values), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

replay = deque(maxlen=4)
for _ in accelerator.epochs(1):
    for state, value in loader:
        replay.append((state, value))
        state, value = (torch.cat(parts) for parts in zip(*replay))
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(state), value), weight=len(state))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
