"""A classifier that accumulates ragged micro-batches, with clipping at the end of each window."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def main():
    set_seed(3)
    accelerator = Accelerator(
        global_batch_size=16,
        project_config=ProjectConfiguration("runs/accumulation", automatic_checkpoint_naming=True, total_limit=2),
    )
    points = torch.randn(144, 6)
    labels = (points[:, 0] > points[:, 1]).long() + (points[:, 2] > 0).long()
    loader = DataLoader(TensorDataset(points, labels), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.num_updates % 3 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
