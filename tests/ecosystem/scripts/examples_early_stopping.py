"""Early stopping: one process sets a trigger, and all processes leave the loop."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from examples_material import digit_loaders, make_net

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(9)
train_loader, _ = digit_loaders(8)
model = make_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
num_low = num_steps = 0
for _ in range(8):
    for images, labels in train_loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        num_low = num_low + 1 if loss.item() < 0.6 else 0
        if num_low == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
evidence.add("stopped after", num_steps)
if accelerator.is_main_process:
    evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
