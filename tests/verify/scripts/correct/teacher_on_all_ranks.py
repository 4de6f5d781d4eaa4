"""Self-distillation with a mean teacher that is registered, and warmup; evaluation every two updates."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed


class MeanTeacher:
    def __init__(self, student, decay):
        self.model, self.decay = copy.deepcopy(student).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, student):
        for mine, its in zip(self.model.parameters(), student.parameters()):
            mine.lerp_(its, 1 - self.decay)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    accuracy = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    return accuracy


def main():
    set_seed(8)
    accelerator = Accelerator(project_config=ProjectConfiguration("runs/teacher", automatic_checkpoint_naming=True))
    x, y = torch.randn(128, 10), torch.randint(0, 3, (128,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
    teacher = MeanTeacher(model, 0.5)
    accelerator.register_for_checkpointing(teacher)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume("latest")
    for epoch in accelerator.epochs(2):
        for rows, labels in loader:
            logits = model(rows)
            with torch.no_grad():
                target = teacher.model(rows).softmax(-1)
            loss = F.cross_entropy(logits, labels) + F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            teacher.update(accelerator.unwrap_model(model))
            if accelerator.num_updates % 2 == 0:
                accelerator.print(evaluate(model, x, y))
        accelerator.save_state()


main()
