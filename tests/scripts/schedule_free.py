"""Classifies digits with a schedule-free optimizer, which has no schedule and different weights for training and evaluation."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import is_schedulefree_available, set_seed
from evidence import Evidence
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if is_schedulefree_available():
    import schedulefree
else:
    raise ImportError("This script needs the package `schedulefree`: run `pip install schedulefree`.")


def get_dataloaders(args):
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:715], labels[512:715])
    train_dataloader = DataLoader(train, shuffle=not args.in_order, batch_size=args.batch_size, drop_last=True)
    eval_dataloader = DataLoader(test, shuffle=False, batch_size=32)
    return train_dataloader, eval_dataloader


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    evidence = Evidence(args.evidence, accelerator.process_index)
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(48, 10))
    model = model.to(accelerator.device)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=args.lr, warmup_steps=4, betas=(0.9, 0.99))
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    for epoch in range(args.num_epochs):
        model.train()
        optimizer.train()
        for inputs, targets in train_dataloader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            evidence.add("loss", loss)
            accelerator.backward(loss)
            evidence.gradients(accelerator.unwrap_model(model))
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        optimizer.eval()
        accurate, num_elems = 0, 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            accurate += (predictions == references).sum().item()
            num_elems += references.shape[0]
        evidence.add("metrics", accurate, num_elems)
        evidence.parameters(accelerator.unwrap_model(model))
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")
    evidence.write()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
