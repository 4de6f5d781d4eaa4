"""A contrastive loss over the pairs of all processes: each rank compares its own rows with those of all ranks."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


def gather_with_own_gradients(accelerator, rows):
    everyone = accelerator.gather(rows.detach())
    first = accelerator.process_index * len(rows)
    return torch.cat((everyone[:first], rows, everyone[first + len(rows) :]))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
        self.text = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, image, text):
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


def main():
    set_seed(0)
    project = ProjectConfiguration("runs/contrastive", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    causes = torch.randn(128, 3)
    pairs = TensorDataset(causes @ torch.randn(3, 10), causes @ torch.randn(3, 4))
    loader = DataLoader(pairs, batch_size=16 // accelerator.num_processes, shuffle=True, drop_last=True)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    for _ in accelerator.epochs(2):
        for image, text in loader:
            with accelerator.accumulate(model):
                left, right = model(image, text)
                left = gather_with_own_gradients(accelerator, left)
                right = gather_with_own_gradients(accelerator, right)
                scores = 5 * left @ right.T
                same = torch.arange(len(left), device=scores.device)
                loss = (
                    cross_entropy(scores, same, reduction="sum") + cross_entropy(scores.T, same, reduction="sum")
                ) / 2
                accelerator.backward(loss, weight=len(image), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.num_updates % 2 == 0:
                accelerator.save_state()
    accelerator.end_training()


if __name__ == "__main__":
    main()
