"""k-fold cross-validation on handwritten digits: trains one model per fold and averages their predictions on the test set."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from evidence import Evidence
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def get_fold_dataloaders(dataset, test, train_indices, valid_indices, args):
    train_dataloader = DataLoader(Subset(dataset, train_indices), shuffle=not args.in_order, batch_size=args.batch_size)
    eval_dataloader = DataLoader(Subset(dataset, valid_indices), shuffle=False, batch_size=args.eval_batch_size)
    test_dataloader = DataLoader(test, shuffle=False, batch_size=args.eval_batch_size)
    return train_dataloader, eval_dataloader, test_dataloader


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    evidence = Evidence(args.evidence, accelerator.process_index)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    split = args.num_train
    dataset = TensorDataset(images[:split], labels[:split])
    test = TensorDataset(images[split : split + args.num_test], labels[split : split + args.num_test])

    folds = StratifiedKFold(n_splits=args.num_folds, shuffle=True, random_state=0)
    test_predictions, test_references = [], []
    for fold, (train_indices, valid_indices) in enumerate(folds.split(images[:split], labels[:split])):
        set_seed(args.seed + fold)
        train_dataloader, eval_dataloader, test_dataloader = get_fold_dataloaders(
            dataset, test, train_indices.tolist(), valid_indices.tolist(), args
        )
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
        )
        model = model.to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=args.lr, epochs=args.num_epochs, steps_per_epoch=len(train_dataloader)
        )
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler
        )

        for epoch in range(args.num_epochs):
            model.train()
            for inputs, targets in train_dataloader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                evidence.add("loss", loss)
                accelerator.backward(loss)
                evidence.gradients(accelerator.unwrap_model(model))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            model.eval()
            correct, total = 0, 0
            for inputs, targets in eval_dataloader:
                with torch.no_grad():
                    predictions = model(inputs).argmax(dim=-1)
                predictions, references = accelerator.gather_for_metrics((predictions, targets))
                correct += (predictions == references).sum().item()
                total += len(references)
            evidence.add("metrics", correct, total)
            accelerator.print(f"fold {fold}, epoch {epoch}: {correct / total:.3f}")

        fold_predictions = []
        for inputs, targets in test_dataloader:
            with torch.no_grad():
                predictions = model(inputs)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            fold_predictions.append(predictions.cpu())
            if fold == 0:
                test_references.append(references.cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        evidence.parameters(accelerator.unwrap_model(model))
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler = accelerator.free_memory(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler
        )

    averaged = torch.stack(test_predictions, dim=0).sum(dim=0).div(args.num_folds)
    references = torch.cat(test_references)
    accuracy = (averaged.argmax(dim=-1) == references).double().mean()
    accelerator.print(f"test accuracy of {args.num_folds} models together: {accuracy:.3f}")
    evidence.add("metrics", accuracy, len(references))
    evidence.add("test logits", averaged.double().sum(), averaged.double().norm())
    evidence.write()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--num_folds", type=int, default=3)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--num_train", type=int, default=288)
    parser.add_argument("--num_test", type=int, default=101)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
