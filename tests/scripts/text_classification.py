"""Fine-tunes a small BERT to distinguish positive from negative reviews, with early stopping."""

import argparse
import random

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from evidence import Evidence
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

MAX_GPU_BATCH_SIZE = 16
PRAISE = ["good", "great", "warm", "bright", "kind", "fresh", "lovely", "clever"]
BLAME = ["bad", "dull", "cold", "poor", "rude", "stale", "broken", "slow"]
FILLER = ["the", "a", "film", "dinner", "house", "trip", "was", "and", "very", "so", "with", "its", "people", "room"]
VOCABULARY = {word: index for index, word in enumerate(["[pad]", "[cls]", *PRAISE, *BLAME, *FILLER])}


def make_reviews(number, seed):
    """Return sentences of 5 to 13 tokens with one to three words that reveal the label. About 6% of the labels are wrong."""
    draw = random.Random(seed)
    reviews = []
    for _ in range(number):
        label = draw.randrange(2)
        words = draw.choices(FILLER, k=draw.randint(3, 9)) + draw.choices((BLAME, PRAISE)[label], k=draw.randint(1, 3))
        draw.shuffle(words)
        label ^= draw.random() < 0.06
        reviews.append({"input_ids": [VOCABULARY["[cls]"], *(VOCABULARY[word] for word in words)], "labels": label})
    return reviews


def get_dataloaders(accelerator, args, batch_size):
    with accelerator.main_process_first():
        train, evaluation = make_reviews(args.num_train, seed=1), make_reviews(args.num_eval, seed=2)

    def collate_fn(examples):
        longest = max(len(example["input_ids"]) for example in examples)
        # On TPU it is best to pad everything to the same length.
        length = 16 if accelerator.distributed_type == DistributedType.XLA else longest
        input_ids = torch.zeros(len(examples), length, dtype=torch.long)
        for row, example in enumerate(examples):
            input_ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}

    train_dataloader = DataLoader(train, shuffle=not args.in_order, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(evaluation, shuffle=False, collate_fn=collate_fn, batch_size=args.eval_batch_size)
    return train_dataloader, eval_dataloader


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.num_bad = patience, float("inf"), 0

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.num_bad = loss, 0
        else:
            self.num_bad += 1
        return self.num_bad >= self.patience


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    evidence = Evidence(args.evidence, accelerator.process_index)
    batch_size = args.batch_size
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE

    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, args, batch_size)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=args.lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=4,
        num_training_steps=(len(train_dataloader) * args.num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    should_stop = EarlyStopping(args.patience)

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / gradient_accumulation_steps
            evidence.add("loss", loss)
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                evidence.gradients(accelerator.unwrap_model(model))
                optimizer.step()
                lr_scheduler.step()
                evidence.add("lr", lr_scheduler.get_last_lr()[0])
                optimizer.zero_grad()

        model.eval()
        num_right, num_seen, losses = 0, 0, []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            num_right += (predictions == references).sum().item()
            num_seen += references.shape[0]
            per_row = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")
            losses.append(accelerator.gather_for_metrics(per_row))
        eval_loss = torch.cat(losses).mean().item()
        evidence.add("metrics", num_right, num_seen, eval_loss)
        accelerator.print(f"epoch {epoch}: accuracy {num_right / num_seen:.3f}, loss {eval_loss:.4f}")

        # Any process can trigger the stop; check_trigger() tells all of them.
        if should_stop(eval_loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(f"no improvement for {args.patience} epochs: stopping after epoch {epoch}")
            break

    evidence.add("last epoch", epoch)
    evidence.parameters(accelerator.unwrap_model(model))
    evidence.write()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--num_train", type=int, default=256)
    parser.add_argument("--num_eval", type=int, default=45)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
