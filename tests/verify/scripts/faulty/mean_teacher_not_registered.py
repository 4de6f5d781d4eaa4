"""Semi-supervised learning with a mean teacher: an average of the weights, whose answers the student has to match.

Fault: the average is not registered for checkpoints, so a resumed run restarts it from the student. Reported as
yolov5#310 and ai2cm/ace#349.
Expect: resume is exact: differs from the first update after the resume; the average (a model outside prepare) is not
saved.
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/teacher", automatic_checkpoint_naming=True, total_limit=2)
)
x = torch.randn(80, 4)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes, shuffle=True)
student = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
accelerator.resume()
teacher = copy.deepcopy(student).requires_grad_(False)

for _ in accelerator.epochs(1):
    for rows, targets in loader:
        with accelerator.accumulate(student):
            answers = student(rows)
            loss = nn.functional.mse_loss(answers, targets) + nn.functional.mse_loss(answers, teacher(rows))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters()):
                slow.lerp_(fast, 0.1)
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
