"""Self-distillation with a mean teacher, whose outputs are the targets.

Fault: Only the main process updates the teacher, so the other ranks learn from the teacher of the start.
Expect: same result on n processes: teacher's weights differ between ranks; teacher line or update under is_main_process
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed


class MeanTeacher:
    def __init__(self, student, decay):
        self.model, self.decay = copy.deepcopy(student).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, student):
        for mine, its in zip(self.model.parameters(), student.parameters()):
            mine.lerp_(its, 1 - self.decay)


def main():
    set_seed(8)
    accelerator = Accelerator()
    x, y = torch.randn(128, 10), torch.randint(0, 3, (128,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
    teacher = MeanTeacher(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, labels in loader:
            logits = model(rows)
            with torch.no_grad():
                target = teacher.model(rows).softmax(-1)
            loss = F.cross_entropy(logits, labels) + 2 * F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.is_main_process:
                teacher.update(accelerator.unwrap_model(model))


main()
