"""A schedule-free optimizer, which switches between training and evaluation together with the model."""

import schedulefree
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from examples_material import evaluate, make_bert, pair_loaders

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(42)
train_loader, eval_loader = pair_loaders(8)
model = make_bert().to(accelerator.device)
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=5e-3, warmup_steps=3)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
for _ in range(2):
    model.train()
    optimizer.train()
    for batch in train_loader:
        loss = model(**batch).loss
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
    torch.set_grad_enabled(True)
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
