"""Gradient accumulation with `accumulate` and adjust_scheduler=True. The last window and the last batch are short."""

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from examples_material import evaluate, make_bert, pair_loaders
from torch.optim import AdamW
from transformers import get_linear_schedule_with_warmup

from tests.scripts.evidence import Evidence

plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True, sync_with_dataloader=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(42)
train_loader, eval_loader = pair_loaders(7)
model = make_bert()
optimizer = AdamW(model.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train_loader) * 2)
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
for _ in range(2):
    model.train()
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                evidence.gradients(accelerator.unwrap_model(model))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        evidence.add("loss", loss)
        evidence.add("lr", schedule.get_last_lr()[0])
    found = evaluate(accelerator, model, eval_loader)
    evidence.add("metrics", found["accuracy"], found["seen"])
evidence.parameters(accelerator.unwrap_model(model))
evidence.write()
accelerator.end_training()
