"""Finds a batch size that fits: the training function runs again with a smaller batch size after an out-of-memory error."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, release_memory, set_seed
from examples_material import digit_loaders, evaluate, make_net

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)


@find_executable_batch_size(starting_batch_size=24)
def inner_training_loop(batch_size):
    accelerator.free_memory()
    evidence.add("tried", batch_size)
    set_seed(2)
    model = make_net()
    if batch_size > 20:
        model, *_ = release_memory(model, None)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader, eval_loader = digit_loaders(batch_size)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for _ in range(2):
        model.train()
        for images, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            evidence.add("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
    evidence.parameters(accelerator.unwrap_model(model))


inner_training_loop()
evidence.write()
accelerator.end_training()
