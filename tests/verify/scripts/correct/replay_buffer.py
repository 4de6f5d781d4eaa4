"""Value learning from a replay buffer that is registered for checkpoints, filled with the batches of a loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Replay:
    """The latest rows of all ranks, with the same contents on every rank."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.states = torch.zeros(0, 3)
        self.rewards = torch.zeros(0, 1)

    def add(self, states, rewards):
        self.states = torch.cat((self.states, states))[-self.capacity :]
        self.rewards = torch.cat((self.rewards, rewards))[-self.capacity :]

    def state_dict(self):
        return {"states": self.states, "rewards": self.rewards}

    def load_state_dict(self, state):
        self.states, self.rewards = state["states"], state["rewards"]


set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/replay", automatic_checkpoint_naming=True, total_limit=2)
)
states = torch.randn(64, 3)
rewards = states.prod(1, keepdim=True)
loader = DataLoader(TensorDataset(states, rewards), batch_size=8 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
replay = Replay(capacity=24)
accelerator.register_for_checkpointing(replay)
accelerator.resume()

for _ in accelerator.epochs(2):
    for new_states, new_rewards in loader:
        new_states, new_rewards = accelerator.gather((new_states, new_rewards))
        replay.add(new_states, new_rewards)
        first = accelerator.process_index
        old_states = replay.states[first :: accelerator.num_processes]
        old_rewards = replay.rewards[first :: accelerator.num_processes]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(old_states), old_rewards), weight=len(old_states))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
