"""Headway's Trainer on a small classifier, with evaluations, checkpoints every two updates, and a resume."""

import torch
from torch import nn

from headway import Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main():
    set_seed(0)
    points = torch.randn(120, 4)
    rows = [{"x": point, "labels": int(point[0] > point[1])} for point in points]
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=10,
        learning_rate=0.03,
        warmup_ratio=0.2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=rows[:96], eval_dataset=rows[96:])
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
