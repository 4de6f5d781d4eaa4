"""Automatic micro-batching: a loss function without side effects, so that a batch can be repeated in smaller pieces."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/pieces", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(microbatching="auto", project_config=project)
    x = torch.randn(128, 6)
    y = x.sin().sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=16 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    def mean_error(piece):
        rows, expected = piece
        return nn.functional.mse_loss(model(rows), expected)

    for _ in accelerator.epochs(2):
        for batch in loader:
            accelerator.forward_backward(batch, mean_error)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
