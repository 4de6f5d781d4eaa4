"""A GAN on a ring of points: two models that learn in turn, each with its own optimizer.

The noise belongs to the data, so that each update is the same on any number of processes.
"""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(1)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/gan", automatic_checkpoint_naming=True, total_limit=2)
)
angles = 2 * torch.pi * torch.rand(160)
ring = torch.stack((angles.cos(), angles.sin()), 1)
loader = DataLoader(
    TensorDataset(ring, torch.randn(160, 3)), batch_size=16 // accelerator.num_processes, shuffle=True, drop_last=True
)
generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
    generator, critic, generator_optimizer, critic_optimizer, loader
)
accelerator.resume()

for _ in accelerator.epochs(2):
    for step, (real, noise) in enumerate(loader):
        fake = generator(noise)
        with accelerator.accumulate(critic):
            accelerator.backward((softplus(critic(fake.detach())) + softplus(-critic(real))).mean())
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        with accelerator.accumulate(generator):
            accelerator.backward(softplus(-critic(fake)).mean())
            generator_optimizer.step()
            generator_optimizer.zero_grad()
        if step % 2 == 1:
            accelerator.save_state()
accelerator.end_training()
