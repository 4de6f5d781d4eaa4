"""Automatic accumulation: after an out-of-memory error, a smaller batch size is tried, and more steps make up for it."""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from examples_material import evaluate, make_bert, pair_loaders
from torch.optim import AdamW

from tests.scripts.evidence import Evidence

OBSERVED_BATCH_SIZE = 8
accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)


@find_executable_batch_size(starting_batch_size=OBSERVED_BATCH_SIZE)
def train(batch_size):
    accelerator.free_memory()
    evidence.add("tried", batch_size)
    if batch_size > 4:
        raise RuntimeError("CUDA out of memory. (This one is made up.)")
    accelerator.gradient_accumulation_steps = OBSERVED_BATCH_SIZE // batch_size
    set_seed(42)
    train_loader, eval_loader = pair_loaders(batch_size)
    model = make_bert()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for _ in range(2):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                evidence.add("loss", loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found = evaluate(accelerator, model, eval_loader)
        evidence.add("metrics", found["accuracy"], found["seen"])
    evidence.parameters(accelerator.unwrap_model(model))


train()
evidence.write()
accelerator.end_training()
