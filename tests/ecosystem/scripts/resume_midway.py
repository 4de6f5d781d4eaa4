"""A shuffled run that saves in the middle of its second epoch, or resumes there by skipping the earlier batches."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.evidence import Evidence

parser = argparse.ArgumentParser()
parser.add_argument("--project", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--folder", default=None, help="checkpoint to resume from; the newest one if omitted")
parser.add_argument("--binary", action="store_true", help="save weights with torch.save")
args = parser.parse_args()


class Counter:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


project = ProjectConfiguration(project_dir=args.project, automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project, gradient_accumulation_steps=2, cpu=True)
evidence = Evidence("evidence", accelerator.process_index)
set_seed(11)
generator = torch.Generator().manual_seed(0)
rows = torch.randn(48, 4, generator=generator)
dataset = TensorDataset(rows, rows.sum(1, keepdim=True).tanh())
encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
head = torch.nn.Linear(8, 1)
optimizers = [
    torch.optim.AdamW(encoder.parameters(), lr=0.02),
    torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
]
schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, gamma=0.7) for each in optimizers]
loader = DataLoader(dataset, batch_size=4, shuffle=True)
encoder, head, *optimizers, loader = accelerator.prepare(encoder, head, *optimizers, loader)
schedulers = [accelerator.prepare(each) for each in schedulers]
counter = Counter()
accelerator.register_for_checkpointing(counter)

first_epoch, resume_step = 0, 0
if args.resume:
    accelerator.load_state(args.folder)
    first_epoch, resume_step = divmod(counter.seen, len(loader))
for epoch in range(first_epoch, 3):
    active = accelerator.skip_first_batches(loader, resume_step) if epoch == first_epoch and resume_step else loader
    for inputs, targets in active:
        counter.seen += 1
        with accelerator.accumulate(encoder, head):
            loss = torch.nn.functional.mse_loss(head(encoder(inputs)), targets)
            accelerator.backward(loss)
            for each in (*optimizers, *schedulers):
                each.step()
            for each in optimizers:
                each.zero_grad()
        evidence.add("loss", loss)
        evidence.add("lr", *(each.get_last_lr()[0] for each in schedulers))
        if not args.resume and counter.seen == len(loader) + len(loader) // 3 // 2 * 2:
            accelerator.save_state(safe_serialization=not args.binary)
evidence.add("seen", counter.seen)
for part in map(accelerator.unwrap_model, (encoder, head)):
    # Each forward pass replaces a process's running means with those of process 0, so they are not compared.
    evidence.add("parameters", *(each.double().norm() for each in part.parameters()))
    if accelerator.is_main_process:
        evidence.parameters(part)
evidence.write()
accelerator.end_training()
