"""A critic whose weights are clamped after each update.

Fault: the clamp runs under is_main_process, so the replicas of the other ranks keep larger weights.
Expect: same result on n processes: an error on two processes about a parameter changed on one rank; replicas differ.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/critic", automatic_checkpoint_naming=True, total_limit=2)
)
real, fake = torch.randn(80, 4) + 1, torch.randn(80, 4)
loader = DataLoader(TensorDataset(real, fake), batch_size=8 // accelerator.num_processes, shuffle=True)
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
critic, optimizer, loader = accelerator.prepare(critic, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for good, bad in loader:
        with accelerator.accumulate(critic):
            accelerator.backward(critic(bad).mean() - critic(good).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
