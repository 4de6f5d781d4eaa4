"""Tracking with TensorBoard by name and with a custom tracker, and the values that they receive."""

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from examples_material import digit_loaders, evaluate, make_net

from tests.scripts.evidence import Evidence


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.pages = []

    @property
    def tracker(self):
        return self.pages

    @on_main_process
    def store_init_configuration(self, values):
        self.pages.append(len(values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.pages += [step, *values.values()]


PartialState(cpu=True)  # created before the tracker, which needs it to determine its process
own = Notebook()
accelerator = Accelerator(cpu=True, log_with=["tensorboard", own], project_dir="logs")
evidence = Evidence("evidence", accelerator.process_index)
accelerator.init_trackers("digits", config={"lr": 5e-3, "seed": 8, "name": "net"})
set_seed(8)
train_loader, eval_loader = digit_loaders(10)
model = make_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
for epoch in range(2):
    model.train()
    total_loss = 0.0
    for images, labels in train_loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        total_loss += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found = evaluate(accelerator, model, eval_loader)
    accelerator.log({"accuracy": found["accuracy"], "train_loss": total_loss.item() / len(train_loader)}, step=epoch)
if accelerator.is_main_process:
    evidence.add("pages", *accelerator.get_tracker("notebook", unwrap=True))
    evidence.add("writer", hasattr(accelerator.get_tracker("tensorboard", unwrap=True), "add_scalar"))
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
