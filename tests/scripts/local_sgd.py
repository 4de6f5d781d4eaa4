"""Local SGD: each process makes several updates alone, then all processes average their parameters."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from evidence import Evidence
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(args):
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(images[:256], labels[:256]), TensorDataset(images[256:377], labels[256:377])
    return (
        DataLoader(train, shuffle=not args.in_order, batch_size=args.batch_size),
        DataLoader(test, shuffle=False, batch_size=32),
    )


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    evidence = Evidence(args.evidence, accelerator.process_index)
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    model = model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    for epoch in range(args.num_epochs):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps, enabled=True
        ) as local_sgd:
            for inputs, targets in train_dataloader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    evidence.add("loss", loss)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        evidence.gradients(accelerator.unwrap_model(model))
                    optimizer.step()
                    optimizer.zero_grad()
                    # LocalSGD-specific line
                    local_sgd.step()
                evidence.parameters(accelerator.unwrap_model(model), name="on the way")

        model.eval()
        accurate, total = 0, 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            accurate += (predictions == references).sum().item()
            total += len(references)
        evidence.add("metrics", accurate, total)
        accelerator.print(f"epoch {epoch}: {accurate / total:.3f}")
    evidence.parameters(accelerator.unwrap_model(model))
    evidence.write()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--local_sgd_steps", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
