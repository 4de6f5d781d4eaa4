"""Communication hooks of DDP: gradients that are sent in float16, or compressed by PowerSGD."""

import sys

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from examples_material import digit_loaders, evaluate, make_net

from tests.scripts.evidence import Evidence

option = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "use_error_feedback": True, "warm_start": True}
kinds = {
    "fp16": DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
    "power_sgd": DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD, comm_wrapper=DDPCommunicationHookType.NO, comm_state_option=option
    ),
}
accelerator = Accelerator(cpu=True, kwargs_handlers=[kinds[sys.argv[1]]])
evidence = Evidence("evidence", accelerator.process_index)
set_seed(8)
train_loader, eval_loader = digit_loaders(8)
model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
for images, labels in train_loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        evidence.add("loss", loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
found = evaluate(accelerator, model, eval_loader)
evidence.add("metrics", found["accuracy"], found["seen"])
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
