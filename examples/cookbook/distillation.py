"""Distillation: a small student learns from the outputs of a larger teacher, and from the labels.

Run: headway launch --cpu -n 2 examples/cookbook/distillation.py

The teacher has no optimizer. It is frozen, moved to the device by hand and called without gradients, so it costs one
forward pass and no gradient memory. A teacher too large for one device can be prepared, and is then sharded. Prints how
often the student agrees with the teacher: at the end, in about nine of ten samples.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, set_seed

TEMPERATURE = 2.0


def make_network(width: int) -> nn.Module:
    """Return a classifier of 8 numbers into 4 classes."""
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def make_teacher() -> nn.Module:
    """Return a frozen teacher. In a real program: `from_pretrained`."""
    teacher = make_network(width=128)
    teacher.requires_grad_(False)
    return teacher.eval()


def distillation_loss(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Return the mean of the distance to the teacher's probabilities and the cross-entropy with the labels."""
    distance = kl_div(
        log_softmax(student_logits / TEMPERATURE, dim=1),
        softmax(teacher_logits / TEMPERATURE, dim=1),
        reduction="batchmean",
    )
    return 0.5 * TEMPERATURE**2 * distance + 0.5 * cross_entropy(student_logits, classes)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args(arguments)

    set_seed(0)
    accelerator = Accelerator()
    teacher = make_teacher()
    student = make_network(width=16)
    inputs = torch.randn(1024, 8)
    classes = teacher(inputs).argmax(1)
    rows = TensorDataset(inputs, classes)
    train_loader = DataLoader(rows, batch_size=32 // accelerator.num_data_shards, shuffle=True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, optimizer, train_loader = accelerator.prepare(student, optimizer, train_loader)
    teacher.to(accelerator.device)

    for epoch in range(args.epochs):
        num_right = torch.zeros((), device=accelerator.device)
        for inputs, classes in train_loader:
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            with accelerator.accumulate(student):
                student_logits = student(inputs)
                accelerator.backward(distillation_loss(student_logits, teacher_logits, classes))
                optimizer.step()
                optimizer.zero_grad()
            num_right += (student_logits.argmax(1) == classes).sum()
        agreement = accelerator.reduce(num_right, "sum").item() / len(rows)
        accelerator.print(f"epoch {epoch}: the student agrees with the teacher in {agreement:.1%} of the samples")

    result = {"agreement": agreement, "weight": student[0].weight.detach().cpu()}
    accelerator.end_training()
    return result


if __name__ == "__main__":
    main()
