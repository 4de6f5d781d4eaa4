"""Headway's Trainer with a custom optimizer.

Fault: the optimizer gets the parameters of the body alone; the head receives gradients, and is never changed.
Expect: what learns, learns: head.weight and head.bias have gradients, but belong to no optimizer.
"""

import torch
from torch import nn

from headway import Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.head = nn.Linear(16, 2)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main():
    set_seed(0)
    points = torch.randn(96, 4)
    rows = [{"x": point, "labels": int(point[0] > point[1])} for point in points]
    arguments = TrainingArguments(
        output_dir="runs/headless_trainer",
        per_device_train_batch_size=8,
        max_steps=10,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
    )
    model = Classifier()
    optimizer = torch.optim.AdamW(model.body.parameters(), lr=0.01)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
