"""Early stopping by the mean validation loss over all ranks, counted in the checkpoint."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, EarlyStopping, ProjectConfiguration, set_seed


def main():
    set_seed(6)
    project = ProjectConfiguration("runs/stopping", automatic_checkpoint_naming=True, total_limit=2, keep_best="min")
    accelerator = Accelerator(project_config=project)
    x = torch.randn(88, 4)
    y = x @ torch.randn(4, 1) + 0.5 * torch.randn(88, 1)
    train_loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=16 // accelerator.num_processes, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    stopping = EarlyStopping(patience=2, min_delta=1e-3)
    accelerator.register_for_checkpointing(stopping)
    accelerator.resume()

    for _ in accelerator.epochs(8):
        if stopping.should_stop:
            break
        for rows, expected in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(rows), expected))
                optimizer.step()
                optimizer.zero_grad()
        total, count = 0.0, 0
        with torch.no_grad():
            for rows, expected in test_loader:
                errors = (model(rows) - expected).square().flatten()[: test_loader.num_valid]
                total += errors.sum().item()
                count += len(errors)
        mean = accelerator.reduce_mean(total, count)
        stopping.update(mean)
        accelerator.save_state(metric=mean)
    accelerator.end_training()


if __name__ == "__main__":
    main()
