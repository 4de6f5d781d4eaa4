"""The complete vision example: normalized images, OneCycleLR, a frozen layer, checkpoints, and weights saved at the end."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from examples_material import digit_loaders, evaluate, make_net
from safetensors.torch import load_file
from torch.optim.lr_scheduler import OneCycleLR

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
evidence = Evidence("evidence", accelerator.process_index)
accelerator.init_trackers("complete_cv", {"lr": 0.03})
set_seed(7)
train_loader, eval_loader = digit_loaders(16)
model = make_net().to(accelerator.device)
for parameter in model[0].parameters():
    parameter.requires_grad = False
mean, std = torch.tensor(0.3).to(accelerator.device), torch.tensor(0.35).to(accelerator.device)
optimizer = torch.optim.Adam((each for each in model.parameters() if each.requires_grad), lr=0.03 / 25)
schedule = OneCycleLR(optimizer=optimizer, max_lr=0.03, epochs=3, steps_per_epoch=len(train_loader))
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
for epoch in range(3):
    model.train()
    total_loss = 0
    for step, (images, labels) in enumerate(train_loader):
        outputs = model((images - mean) / std)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        total_loss += loss.detach().float()
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        evidence.add("lr", schedule.get_last_lr()[0])
        schedule.step()
        optimizer.zero_grad()
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
    accelerator.log(
        {"accuracy": 100 * found["accuracy"], "train_loss": total_loss.item() / len(train_loader)}, step=epoch
    )
    accelerator.save_state(os.path.join("checkpoints", f"epoch_{epoch}"))
evidence.gradients(accelerator.unwrap_model(model))
evidence.parameters(accelerator.unwrap_model(model))
accelerator.wait_for_everyone()
accelerator.save_model(model, "weights")
accelerator.load_state(os.path.join("checkpoints", "epoch_0"))
evidence.parameters(accelerator.unwrap_model(model), name="after the first epoch")
evidence.add("saved", *(value.double().sum() for _, value in sorted(load_file("weights/model.safetensors").items())))
evidence.write()
accelerator.end_training()
