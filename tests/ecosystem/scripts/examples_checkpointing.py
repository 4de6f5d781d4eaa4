"""Checkpoints that the library numbers. The newest one, from the middle of an epoch, is loaded in the same process."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from examples_material import digit_loaders, evaluate, make_net

from tests.scripts.evidence import Evidence

project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=project)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(5)
train_loader, eval_loader = digit_loaders(8)
model = make_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
accelerator.register_for_checkpointing(schedule)


def train(loader, saves):
    model.train()
    for step, (images, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if saves and step % 4 == 3:
            accelerator.save_state()


for _ in range(2):
    train(train_loader, saves=True)
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
folders = sorted(os.listdir("run/checkpoints"), key=lambda name: int(name.rsplit("_", 1)[1]) if "_" in name else -1)
folders = [name for name in folders if name.startswith("checkpoint_")]
evidence.add("folders", len(folders), int(folders[-1].rsplit("_", 1)[1]))
evidence.parameters(accelerator.unwrap_model(model))
accelerator.load_state()
evidence.parameters(accelerator.unwrap_model(model), name="taken up")
evidence.add("lr", schedule.get_last_lr()[0])
evidence.write()
accelerator.end_training()
