"""Headway's Trainer with a custom loss: errors are divided by their running mean.

Fault: the running mean is an attribute of the Trainer, which no checkpoint contains; it starts at 1 in a resumed run.
Expect: resume is exact: samples and parameters agree at the resume, the loss does not; Scaled.mean outside the checkpoint.
"""

import torch
from torch import nn

from headway import Trainer, TrainingArguments, set_seed


class Scaled(Trainer):
    mean = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        targets = inputs.pop("labels")
        answers = model(**inputs)
        error = nn.functional.mse_loss(answers, targets)
        loss = error / self.mean
        average = self.accelerator.reduce(error.detach(), "mean").item()
        self.mean = 0.8 * self.mean + 0.2 * average
        return (loss, answers) if return_outputs else loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x)


def main():
    set_seed(0)
    points = torch.randn(96, 4)
    rows = [{"x": point, "labels": 10 * point.sum()[None]} for point in points]
    arguments = TrainingArguments(
        output_dir="runs/scaled_trainer",
        per_device_train_batch_size=8,
        max_steps=10,
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    Scaled(Net(), arguments, train_dataset=rows).train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
