"""transformers' Trainer on a small GPT-2 with dropout. The script records its logs, metrics and weights."""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from tests.scripts.evidence import Evidence

TIMES = ("runtime", "per_second", "preparation_time")


class Tokens(Dataset):
    """Sequences of 12 tokens. The labels of the first tokens are ignored, up to seven in each sequence."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 64, (count, 12), generator=generator)
        self.ignored = torch.randint(0, 8, (count,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[: int(self.ignored[index])] = -100
        return {"input_ids": tokens, "labels": labels}


class Stream(IterableDataset):
    """An iterable dataset with the items of another dataset."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Sentences(Dataset):
    """Sequences of different lengths."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        length = 4 + index % 9
        tokens = self.data[index]["input_ids"][:length].tolist()
        return {"input_ids": tokens, "labels": tokens}


def pad(items):
    length = max(len(item["input_ids"]) for item in items)
    rows = torch.tensor([item["input_ids"] + [0] * (length - len(item["input_ids"])) for item in items])
    labels = torch.tensor([item["labels"] + [-100] * (length - len(item["labels"])) for item in items])
    return {"input_ids": rows, "attention_mask": (labels >= 0).long(), "labels": labels}


def corrupt(items):
    """Replace random tokens, drawn from torch's global generator."""
    rows = torch.stack([item["input_ids"] for item in items])
    noise = torch.randint(0, 64, rows.shape)
    return {
        "input_ids": torch.where(torch.rand(rows.shape) < 0.2, noise, rows),
        "labels": torch.stack([item["labels"] for item in items]),
    }


class Hungry(GPT2LMHeadModel):
    """A model that runs out of memory with more than two samples in a training batch."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        if self.training and len(input_ids) > 2:
            torch.empty(2**56, dtype=torch.uint8)
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def measure(prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    hits = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"hits": float(hits.sum()), "rows": len(labels), "sum": float(logits.astype(numpy.float64).sum())}


def build(flags):
    set_seed(flags.seed)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    rank = int(os.environ.get("RANK", 0))
    model = (Hungry if rank in (flags.hungry or ()) else GPT2LMHeadModel)(config)
    if flags.perturbed:
        torch.nn.init.constant_(model.transformer.wte.weight, 0.1)
    given = {"per_device_train_batch_size": 4, **json.loads(flags.arguments)}
    arguments = TrainingArguments(
        output_dir=flags.output, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, learning_rate=5e-3,
        per_device_eval_batch_size=4, seed=flags.seed, save_strategy=flags.save, **given,
    )  # fmt: skip
    data = Tokens(flags.samples, seed=1)
    data = Stream(data) if flags.data == "stream" else Sentences(data) if flags.data == "lengths" else data
    collator = {"lengths": pad, "corrupt": corrupt}.get(flags.data)
    return Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=data,
        eval_dataset=Tokens(13, seed=2),
        compute_metrics=measure,
    )


def note_logs(evidence, history):
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and not any(word in name for word in TIMES):
                evidence.add(f"log: {name}", value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arguments", default="{}", help="JSON, for TrainingArguments")
    parser.add_argument("--data", choices=["tokens", "stream", "lengths", "corrupt"], default="tokens")
    parser.add_argument("--samples", type=int, default=26)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--output", default="out")
    parser.add_argument("--save", default="no")
    parser.add_argument(
        "--resume", default=None, help="checkpoint to resume from, or a folder whose last checkpoint is used"
    )
    parser.add_argument("--hungry", type=int, nargs="*", help="ranks that run out of memory with more than two samples")
    parser.add_argument("--perturbed", action="store_true", help="start with other weights, which a resume replaces")
    parser.add_argument("--evaluate", action="store_true", help="also evaluate and predict")
    flags = parser.parse_args()
    logging.getLogger("transformers.trainer").setLevel(logging.ERROR)
    trainer = build(flags)
    evidence = Evidence("evidence", trainer.args.process_index)
    began = time.perf_counter()
    output = trainer.train(resume_from_checkpoint=flags.resume)
    print(f"trained in {time.perf_counter() - began:.2f} s")
    evidence.add("train_loss", output.training_loss)
    evidence.add("step and epoch", trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos)
    evidence.add("batch size", trainer._train_batch_size, trainer.state.max_steps, trainer.state.train_batch_size or 0)
    if flags.evaluate:
        for name, value in trainer.evaluate().items():
            if not any(word in name for word in TIMES):
                evidence.add(name, value)
        predicted = trainer.predict(Tokens(7, seed=4))
        evidence.add("predictions", torch.as_tensor(predicted.predictions), torch.as_tensor(predicted.label_ids))
    note_logs(evidence, trainer.state.log_history)
    evidence.add("best", trainer.state.best_metric or 0.0, trainer.state.best_global_step or 0)
    evidence.add("rank's stream", torch.rand(2))
    model = trainer.accelerator.unwrap_model(trainer.model)
    evidence.add("is sharded", float(any(hasattr(each, "full_tensor") for each in model.parameters())))
    for value in model.state_dict().values():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        evidence.add("weights", whole)
    saved = sorted(str(path) for path in Path(flags.output).glob("checkpoint-*"))
    evidence.add("checkpoints", len(saved), *(float(path.rpartition("-")[2]) for path in saved))
    evidence.write()


main()
