"""A regression with a penalty that grows with the number of calls of the model, under automatic micro-batching.

Fault: forward counts its calls in a Python attribute; a batch that is run again, or in pieces, counts more than once.
Expect: out of memory is harmless: loss differs after the replay; the attribute Net.calls is not restored (a buffer is).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 16), nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        hidden = self.inner(x).relu()
        penalty = min(1.0, self.calls / 10) * hidden.square().mean(1)
        return self.outer(hidden), penalty

    def get_extra_state(self):
        return torch.tensor(self.calls)

    def set_extra_state(self, state):
        self.calls = int(state)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/calls", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    x = torch.randn(96, 5)
    y = x.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(1):
        for batch in loader:
            for rows, expected in accelerator.microbatches(batch):
                with accelerator.accumulate(model):
                    answers, penalty = model(rows)
                    accelerator.backward(nn.functional.mse_loss(answers, expected) + penalty.mean())
                    optimizer.step()
                    optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
