"""Metrics over processes: gather_for_metrics, a last batch that the script cuts itself, objects, and a loss per process."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from examples_material import Accuracy, digit_loaders, make_net

from tests.scripts.evidence import Evidence

accelerator = Accelerator(cpu=True)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(6)
_, eval_loader = digit_loaders(6, num_eval=67)
model = make_net()
model, eval_loader = accelerator.prepare(model, eval_loader)
model.eval()
metric, by_hand, losses, texts, samples_seen = Accuracy(), Accuracy(), [], [], 0
for step, (images, labels) in enumerate(eval_loader):
    with torch.no_grad():
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    predictions = logits.argmax(dim=-1)
    joined, references = accelerator.gather_for_metrics((predictions, labels))
    metric.add_batch(predictions=joined, references=references)
    losses.append(accelerator.gather_for_metrics(loss).reshape(-1))
    texts += accelerator.gather_for_metrics([str(each) for each in predictions.tolist()], use_gather_object=True)
    joined, references = accelerator.gather((predictions, labels))
    if accelerator.use_distributed:
        if step == len(eval_loader) - 1:
            left = len(eval_loader.dataset) - samples_seen
            joined, references = joined[:left], references[:left]
        else:
            samples_seen += references.shape[0]
    by_hand.add_batch(predictions=joined, references=references)
for found in (metric.compute(), by_hand.compute()):
    evidence.add("metrics", found["accuracy"], found["seen"])
evidence.add("losses", torch.cat(losses))
evidence.add("texts", *map(int, texts))
evidence.add("parts", *gather_object([accelerator.process_index, 7]))
evidence.add("reduced", accelerator.reduce(torch.tensor([1.0, accelerator.process_index]), reduction="mean"))
padded = accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index), dim=0, pad_index=-1)
evidence.add("padded", accelerator.gather(padded))
evidence.write()
accelerator.end_training()
