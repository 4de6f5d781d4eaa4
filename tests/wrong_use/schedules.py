"""Mistakes with learning rate schedules."""

from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau

from tests.wrong_use.row import EQUAL, Section, error, warning
from tests.wrong_use.script import Script, net, sgd, windows

section = Section("Schedules")
row = section.row


def make_halving_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda tick: 0.5**tick)


def compute_rates_by_hand(_: Script) -> list[float]:
    """Return the learning rate of each update in plain PyTorch, with one schedule step per update."""
    model = net()
    optimizer = sgd(model)
    schedule = make_halving_schedule(optimizer)
    found = []
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def record_rates(s: Script, make: Any, is_prepared: bool = True, tick: Any = None, **options: Any) -> list[float]:
    """Return the learning rate of each update."""
    accelerator = s.start(**options)
    model, optimizer, loader = s.build(accelerator)
    schedule = make(optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if is_prepared:
        schedule = accelerator.prepare(schedule)
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if tick is None:
                schedule.step()
            else:
                tick(accelerator, schedule)
            optimizer.zero_grad()
    return found


BY_UPDATES = {"scheduler_ticks": "updates"}


@row("`scheduler.step()` in each micro-batch", EQUAL, by_hand=compute_rates_by_hand)
def each_micro_batch(s: Script) -> Any:
    return record_rates(s, make_halving_schedule, **BY_UPDATES)


@row("`scheduler.step()` under `if accelerator.sync_gradients:`", EQUAL, by_hand=compute_rates_by_hand)
def if_sync(s: Script) -> Any:
    return record_rates(
        s, make_halving_schedule, tick=lambda a, schedule: schedule.step() if a.sync_gradients else None, **BY_UPDATES
    )


@row("`scheduler.step()` twice in each micro-batch, which counts once per update", EQUAL, by_hand=compute_rates_by_hand)
def twice(s: Script) -> Any:
    return record_rates(
        s, make_halving_schedule, tick=lambda a, schedule: (schedule.step(), schedule.step()), **BY_UPDATES
    )


@row(
    "a schedule that is not prepared, with a step in each micro-batch",
    warning("Detected call of `lr_scheduler.step()` before"),
    by_hand=compute_rates_by_hand,
)
def not_prepared(s: Script) -> Any:
    return record_rates(s, make_halving_schedule, is_prepared=False)


@row(
    "a schedule that is not prepared, with a step under `if accelerator.sync_gradients:`",
    EQUAL,
    by_hand=compute_rates_by_hand,
)
def not_prepared_but_right(s: Script) -> Any:
    return record_rates(
        s, make_halving_schedule, False, lambda a, schedule: schedule.step() if a.sync_gradients else None
    )


@row("a schedule built from the prepared optimizer", EQUAL, by_hand=compute_rates_by_hand)
def of_the_prepared(s: Script) -> Any:
    accelerator = s.start(**BY_UPDATES)
    model, optimizer, loader = accelerator.prepare(*s.build(accelerator))
    schedule = accelerator.prepare(make_halving_schedule(optimizer))
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return found


@row(
    "a schedule whose length is computed from the prepared loader, without `scheduler_ticks`",
    single=None,
    tp=None,
    ddp=warning("multiply it by accelerator.num_data_shards"),
    fsdp=warning("multiply it by accelerator.num_data_shards"),
)
def of_the_prepared_loader(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    num_updates = 3 * len(loader) // accelerator.gradient_accumulation_steps
    schedule = accelerator.prepare(LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=num_updates))
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


@row("a schedule prepared without its optimizer", error("not prepared"))
def without_its_optimizer(s: Script) -> Any:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    accelerator.prepare(model, loader, make_halving_schedule(optimizer))


@row("`scheduler.step()` before `optimizer.step()`", EQUAL, by_hand=compute_rates_by_hand)
def before_the_optimizer(s: Script) -> Any:
    accelerator = s.start(**BY_UPDATES)
    model, optimizer, loader = s.build(accelerator)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, make_halving_schedule(optimizer))
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            schedule.step()
            if accelerator.sync_gradients:
                found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
    return found


@row(
    "`ReduceLROnPlateau` given each rank's own loss",
    error("the optimizers of the ranks are not alike"),
    single=None,
    fsdp=None,
    tp=None,
)
def plateau(s: Script) -> Any:
    accelerator = s.start(**BY_UPDATES)
    model, optimizer, loader = s.build(accelerator)
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step(float((2 * accelerator.process_index - 1) * accelerator.num_updates))
            optimizer.zero_grad()
