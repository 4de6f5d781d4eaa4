"""Data and models of the examples: pairs of made-up sentences for a small BERT, and digits for a small network."""

import random

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

NUM_WORDS = 60


def make_pairs(number, seed):
    """Return token IDs of sentence pairs.

    The label says whether the second sentence repeats the largest token of the first one.
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        first, label = [draw.randrange(3, NUM_WORDS) for _ in range(draw.randint(2, 6))], draw.randrange(2)
        second = [draw.randrange(3, NUM_WORDS) for _ in range(draw.randint(2, 5))]
        second[draw.randrange(len(second))] = max(first) if label else 3
        rows.append({"input_ids": [1, *first, 2, *second, 2], "labels": label})
    return rows


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def pair_loaders(batch_size, eval_batch_size=16, num_train=90, num_eval=37):
    train, evaluation = make_pairs(num_train, 1), make_pairs(num_eval, 2)
    return (
        DataLoader(train, shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=False),
        DataLoader(evaluation, shuffle=False, collate_fn=collate, batch_size=eval_batch_size),
    )


def make_bert():
    config = BertConfig(
        vocab_size=NUM_WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def digit_sets(num_train=150, num_eval=70):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    end = num_train + num_eval
    return TensorDataset(images[:num_train], labels[:num_train]), TensorDataset(
        images[num_train:end], labels[num_train:end]
    )


def digit_loaders(batch_size, **sizes):
    train, evaluation = digit_sets(**sizes)
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(evaluation, batch_size=2 * batch_size)


def make_net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.1),
        torch.nn.Linear(144, 10),
    )  # fmt: skip


class Accuracy:
    """A metric that counts correct predictions, like those of evaluation libraries."""

    def __init__(self):
        self.right, self.seen = 0, 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self):
        return {"accuracy": self.right / self.seen, "seen": self.seen}


def evaluate(accelerator, model, loader):
    """Return the accuracy over all processes, for batches of text or of digits."""
    model.eval()
    metric = Accuracy()
    for batch in loader:
        is_text = isinstance(batch, dict)
        with torch.no_grad():
            logits = model(**batch).logits if is_text else model(batch[0])
        references = batch["labels"] if is_text else batch[1]
        predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), references))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()
