"""Cross-validation with stratified folds: a new model for each fold, and a vote of all models on the test set."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from examples_material import digit_sets, evaluate, make_net
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(3)
train, test = digit_sets(120, 50)
labels = [int(label) for _, label in train]
votes, references = [], []
for number, (chosen, held_out) in enumerate(StratifiedKFold(n_splits=3).split(np.zeros(len(labels)), labels)):
    loaders = [
        DataLoader(Subset(train, chosen), batch_size=8, shuffle=True), DataLoader(Subset(train, held_out), batch_size=16),
        DataLoader(test, batch_size=16),
    ]  # fmt: skip
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    for _ in range(2):
        model.train()
        for images, targets in loaders[0]:
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            evidence.add("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    found = evaluate(accelerator, model, loaders[1])
    evidence.add("metrics", found["accuracy"], found["seen"])
    fold = []
    for images, targets in loaders[2]:
        with torch.no_grad():
            logits = model(images)
        logits, targets = accelerator.gather_for_metrics((logits, targets))
        fold.append(logits)
        if number == 0:
            references.append(targets)
    votes.append(torch.cat(fold))
    evidence.parameters(accelerator.unwrap_model(model))
    model, optimizer = accelerator.free_memory(model, optimizer)
predictions = torch.stack(votes).sum(dim=0).div(3).argmax(dim=-1)
evidence.add("metrics", (predictions == torch.cat(references)).float().mean())
evidence.write()
accelerator.end_training()
