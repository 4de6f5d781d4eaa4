"""Local SGD: each process makes several updates alone, then the parameters are averaged."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from examples_material import digit_loaders, evaluate

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(4)
train_loader, eval_loader = digit_loaders(8, num_train=144)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
for _ in range(2):
    model.train()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                evidence.add("loss", loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
