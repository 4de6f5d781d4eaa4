"""Random cases of data loading and schedules: `random_cases.py KIND FIRST LAST` runs the cases with these seeds.

Cases under "Differences" in docs/accelerate_name_reference.md are excluded.
"""

import random
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from tests.scripts.evidence import Evidence


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(1.0 * self.count))


def make_loader(draw, count, is_stream):
    size, drops = draw.randint(1, 5), draw.random() < 0.3
    if is_stream:
        return DataLoader(Stream(count), batch_size=size, drop_last=drops)
    rows = TensorDataset(torch.arange(1.0 * count))
    if draw.random() < 0.2:
        return DataLoader(rows, batch_sampler=BatchSampler(range(count), size, False))
    if draw.random() < 0.2:
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(draw.randint(0, 9)))
        return DataLoader(rows, batch_size=size, sampler=sampler, drop_last=drops)
    return DataLoader(rows, batch_size=size, shuffle=draw.random() < 0.5, drop_last=drops)


def make_config(draw, loader, count, is_stream, world_size):
    """Return random settings with which all ranks make the same number of steps. A shuffled loader is not dispatched."""
    draws = isinstance(getattr(loader, "sampler", None), RandomSampler)
    size = loader.batch_size or loader.batch_sampler.batch_size
    is_short = count < 2 * size * world_size
    return DataLoaderConfiguration(
        split_batches=draw.random() < 0.3 and size % world_size == 0,
        dispatch_batches=draw.choice(
            [None, False] if draws or loader.batch_size is None or is_short else [None, False, True]
        ),
        even_batches=draw.random() < 0.8 or is_stream or count % (size * world_size) > 0,
        use_seedable_sampler=draws and draw.random() < 0.4,
        data_seed=draw.choice([None, 5]),
    )


def get_values(batch):
    return batch[0] if isinstance(batch, list | tuple) else batch


def gather_values(accelerator, values, how):
    if how == "tensor":
        return accelerator.gather_for_metrics(values).tolist()
    if how == "nested":
        found = accelerator.gather_for_metrics({"a": values, "b": [values * 2, values.unsqueeze(1)]})
        return [*found["a"].tolist(), *found["b"][0].tolist(), *found["b"][1].flatten().tolist()]
    if how == "objects":
        return [float(each) for each in accelerator.gather_for_metrics([str(each) for each in values.tolist()])]
    return accelerator.gather_for_metrics(values.tolist(), use_gather_object=True)


def run_loading_case(draw, note):
    """Iterate over a loader several times, sometimes with a break or skipped batches; record rows, gathered values and end flags."""
    world_size = Accelerator(cpu=True).num_processes
    is_stream, count = draw.random() < 0.25, draw.randint(1, 23)
    count += 20 * is_stream
    loader = make_loader(draw, count, is_stream)
    config = make_config(draw, loader, count, is_stream, world_size)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(3)
    made = accelerator.prepare(loader)
    how = draw.choice(["tensor", "nested", "objects", "lists"])
    is_spread = config.dispatch_batches and world_size > 1
    if not is_stream:
        note("length", len(made))
    for _ in range(3):
        skipped, stop = draw.randint(0, 3), draw.randint(1, 6)
        leaves, skips = (draw.random() < 0.3 and not config.use_seedable_sampler for _ in range(2))
        skips = skips and not is_spread
        data = skip_first_batches(made, skipped) if skips else made
        gathers = not is_stream and (not skips or world_size == 1)
        for at, batch in enumerate(data):
            note("rows", *get_values(batch).tolist())
            note("end", accelerator.gradient_state.end_of_dataloader)
            if gathers:
                note(how, *gather_values(accelerator, get_values(batch), how))
            if leaves and at + 1 == stop:
                break
        note("draw", torch.rand(()))


KINDS = {
    "step": lambda optimizer, _: lr_scheduler.StepLR(optimizer, 2, 0.7),
    "lambda": lambda optimizer, _: lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick)),
    "cycle": lambda optimizer, _: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=60),
    "cosine": lambda optimizer, _: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "restarts": lambda optimizer, _: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "plateau": lambda optimizer, draw: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=draw.randint(0, 2), factor=0.5
    ),
}


def run_scheduling_case(draw, note):
    """Make a random sequence of calls, and record the learning rate after each of them."""
    kind = draw.choice(list(KINDS))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=draw.randint(1, 3), step_scheduler_with_optimizer=draw.random() < 0.7,
        dataloader_config=DataLoaderConfiguration(split_batches=draw.random() < 0.3),
    )  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, schedule, data = accelerator.prepare(
        model, optimizer, KINDS[kind](optimizer, draw), DataLoader(torch.ones(24, 1), batch_size=2)
    )
    batches, losses = iter(data), [1.0, 1.0, 0.5]
    for _ in range(draw.randint(3, 14)):
        call = draw.choice(["batch", "batch", "batch", "tick", "update", "bare"])
        if call in ("batch", "bare"):
            batch = next(batches, None)
            if batch is None:
                batches = iter(data)
                batch = next(batches)
        if call == "batch":
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                schedule.step(*([draw.choice(losses)] if kind == "plateau" else []))
                optimizer.zero_grad()
        elif call == "bare":
            accelerator.backward(model(batch).mean())
        elif call == "tick":
            schedule.step(*([draw.choice(losses)] if kind == "plateau" else []))
        else:
            optimizer.step()
            optimizer.zero_grad()
        note("rate", optimizer.param_groups[0]["lr"], *(schedule.get_last_lr() if kind != "plateau" else []))
        note("weights", next(iter(model.parameters())))


what, first, last = sys.argv[1], *map(int, sys.argv[2:4])
evidence = Evidence("evidence", Accelerator(cpu=True).process_index)
for seed in range(first, last):

    def note(name, *values, seed=seed):
        evidence.add(f"{what} {seed}: {name}", *values)

    try:
        {"loading": run_loading_case, "scheduling": run_scheduling_case}[what](random.Random(seed), note)
    except ValueError:
        note("raised", 1)  # Accelerate raises it if a dispatched loader ends too early
    AcceleratorState._reset_state()
    GradientState._reset_state()
evidence.write()
Accelerator(cpu=True).end_training()
