"""A denoising model under automatic micro-batching, whose loss function takes its noise level from an iterator.

Fault: the loss function calls next() on the levels; a batch that is run again gets the next level.
Expect: out of memory is harmless: loss differs from the replayed batch on; the loss function advances an iterator.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class Levels:
    """Noise levels that come in a fixed order. Their position is part of the checkpoint."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return 0.1 + 0.9 * (self.position * 0.618 % 1.0)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/levels", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    data = TensorDataset(torch.randn(96, 2) @ torch.randn(2, 6), torch.randn(96, 6))
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    levels = Levels()
    accelerator.register_for_checkpointing(levels)
    accelerator.resume()

    def denoise(piece):
        clean, noise = piece
        return nn.functional.mse_loss(model(clean + next(levels) * noise), clean)

    for _ in accelerator.epochs(1):
        for batch in loader:
            accelerator.forward_backward(batch, denoise)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
