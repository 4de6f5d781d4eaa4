"""A policy on bandits, with rewards that are normalized over the batch.

Fault: the mean and the standard deviation of the rewards are those of this rank's rows, not of the global batch.
Expect: same result on n processes: the loss depends on other rows of the rank; the statistics need a reduction or
gather.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/bandits", automatic_checkpoint_naming=True, total_limit=2)
)
contexts = torch.randn(96, 5)
actions = torch.randint(0, 3, (96,))
rewards = contexts[torch.arange(96), actions] + 0.1 * torch.randn(96)
data = TensorDataset(contexts, actions, rewards)
loader = DataLoader(data, batch_size=12 // accelerator.num_processes, shuffle=True)
policy = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for context, action, reward in loader:
        with accelerator.accumulate(policy):
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            log_probabilities = policy(context).log_softmax(-1)
            chosen = log_probabilities[torch.arange(len(action)), action]
            accelerator.backward(-(advantage * chosen).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
