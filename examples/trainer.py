"""The Trainer on real data: your own module on scikit-learn's digits, and a BERT from a config on Python's source files.

    python examples/trainer.py                            both, one after the other
    headway launch --cpu -n 2 examples/trainer.py text    the BERT, on two CPU processes

`digits` has a plain module and a loss function. `text` has a transformers BERT that predicts from 24 words of code which package
of the standard library they are from; whole files are held out. If you kill the script and start it again, it continues. Each
task ends with a line that has its accuracy on held-out data.
"""

import argparse
import hashlib
import re
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway import EarlyStoppingCallback, Trainer, TrainingArguments


class Accuracy:
    """Metric that counts batch by batch, so that no predictions are kept."""

    def reset(self) -> None:
        self.num_correct, self.num_seen = 0, 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.num_correct += int((predictions.argmax(-1) == labels).sum())
        self.num_seen += len(labels)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.num_correct / self.num_seen, "seen": self.num_seen}


# ---------------------------------------------------------------------------------------------------- digits, own module


def train_digits(out: Path, epochs: float) -> None:
    """Train a plain module with a loss function."""
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    args = TrainingArguments(
        output_dir=out / "digits", per_device_train_batch_size=32, per_device_eval_batch_size=128, num_train_epochs=epochs,
        learning_rate=3e-3, weight_decay=0.01, warmup_ratio=0.1, lr_scheduler_type="cosine", logging_steps=20,
        eval_strategy="epoch", save_strategy="best", save_total_limit=1, metric_for_best_model="accuracy",
        load_best_model_at_end=True, resume_from_checkpoint=True,
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=TensorDataset(x[:1400], y[:1400]), eval_dataset=TensorDataset(x[1400:], y[1400:]),
        loss_function=nn.functional.cross_entropy, compute_metrics=Accuracy(), callbacks=[EarlyStoppingCallback(3)],
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    trainer.accelerator.print(f"digits: {metrics['eval_accuracy']:.3f} of {metrics['eval_seen']} held out right")


# ------------------------------------------------------------------------------------------------ text, BERT from a config

PACKAGES = ("asyncio", "email", "unittest", "multiprocessing")
NUM_WORDS = 2048  # a word's token is its hash


def make_snippets(length: int, max_per_file: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (training, held-out) rows of hashed words, labeled with the index of their package. Files are not divided."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for label, name in enumerate(PACKAGES):
        for path in sorted((root / name).glob("*.py")):
            words = re.findall(r"[A-Za-z]+", path.read_text())
            tokens = [1 + zlib.crc32(word.lower().encode()) % (NUM_WORDS - 1) for word in words]
            rows = [tokens[start : start + length] for start in range(0, len(tokens), length)]
            is_held_out = hashlib.sha256(path.name.encode()).digest()[0] < 64  # a quarter of the files
            part = held_out if is_held_out else training
            part += [{"input_ids": row, "labels": label} for row in rows[:max_per_file]]
    return training, held_out


def train_text(out: Path, epochs: float, max_per_file: int) -> None:
    """Train a BERT from a config."""
    from transformers import BertConfig, BertForSequenceClassification

    training, held_out = make_snippets(24, max_per_file)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=NUM_WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
                        max_position_embeddings=24, num_labels=len(PACKAGES))  # fmt: skip
    args = TrainingArguments(
        output_dir=out / "text", per_device_train_batch_size=8, gradient_accumulation_steps=2, gradient_checkpointing=True,
        num_train_epochs=epochs, learning_rate=2e-3, weight_decay=0.01, warmup_ratio=0.1, logging_steps=20, group_by_length=True,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, resume_from_checkpoint=True,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, args, train_dataset=training, eval_dataset=held_out, compute_metrics=Accuracy())
    trainer.train()
    metrics = trainer.evaluate()
    counts = [sum(row["labels"] == label for row in held_out) for label in range(len(PACKAGES))]
    trainer.accelerator.print(
        f"text: {metrics['eval_accuracy']:.3f} of {metrics['eval_seen']} held out right; the largest class alone gives "
        f"{max(counts) / len(held_out):.3f}"
    )
    trainer.save_model(out / "text" / "weights")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["digits", "text"], help="digits or text (default: both)")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"), help="folder (default: runs/trainer)")
    parser.add_argument("--epochs", type=float, default=4, help="default: 4")
    parser.add_argument("--snippets", type=int, default=24, help="maximum number of snippets per file (default: 24)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for task in args.tasks:
        if task == "digits":
            train_digits(args.out, args.epochs)
        else:
            train_text(args.out, args.epochs, args.snippets)


if __name__ == "__main__":
    main()
