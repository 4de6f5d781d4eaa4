"""Profiling: a schedule of steps, a handler that receives each trace, and a folder of traces."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed
from examples_material import digit_loaders, make_net

from tests.scripts.evidence import Evidence

tables = []
by_schedule = ProfileKwargs(
    activities=["cpu"], record_shapes=True, schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1},
    on_trace_ready=lambda profile: tables.append(profile.key_averages().table(sort_by="cpu_time_total", row_limit=-1)),
)  # fmt: skip
accelerator = Accelerator(cpu=True, kwargs_handlers=[by_schedule])
evidence = Evidence("evidence", accelerator.process_index)
set_seed(8)
train_loader, _ = digit_loaders(8)
model = make_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
with accelerator.profile() as profile:
    for images, labels in train_loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        profile.step()
evidence.add("tables", len(tables), *("aten::" in table for table in tables))
with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir="traces", with_flops=True)) as profile:
    model(images)
evidence.add("convolutions", sum("convolution" in event.key for event in profile.key_averages()) > 0)
accelerator.wait_for_everyone()
evidence.add("traces", sum(name.endswith(".json") for name in os.listdir("traces")))
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
