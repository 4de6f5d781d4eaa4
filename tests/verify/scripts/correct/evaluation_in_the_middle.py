"""A classifier that is evaluated every four updates, in the middle of an epoch, over all ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def evaluate(accelerator, model, loader):
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for x, y in loader:
            answers, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right += (answers == y).sum().item()
            seen += len(y)
    model.train()
    return right / seen


def main():
    set_seed(4)
    project = ProjectConfiguration("runs/evaluation", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    x = torch.randn(131, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train = TensorDataset(x[:96], y[:96])
    test = TensorDataset(x[96:], y[96:])
    train_loader = DataLoader(train, batch_size=8 // accelerator.num_processes, shuffle=True)
    test_loader = DataLoader(test, batch_size=10)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Dropout(0.0), nn.Linear(20, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    accelerator.resume()

    for _ in accelerator.epochs(2):
        for rows, labels in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
            if accelerator.num_updates % 4 == 0:
                accelerator.print(f"update {accelerator.num_updates}: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
