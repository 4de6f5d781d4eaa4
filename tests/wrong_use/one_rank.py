"""Actions of one rank that the other ranks do not take."""

import torch
from torch.nn.functional import mse_loss

from tests.wrong_use.row import EQUAL, Section, error, plain_error, warning
from tests.wrong_use.script import Script, train

section = Section("One rank alone")
row = section.row

HANGS = error("this run hangs")
CRASHES = error("Is there a distributed collective mismatch in your code?")
DIFFERENT_REDUCTIONS = warning("different values of reduction=")
LEFT = plain_error("had finished the script by then")


@row("`accelerator.gather` under `if accelerator.is_main_process:`", HANGS, single=EQUAL, fsdp=CRASHES)
def gathers_alone(s: Script) -> None:
    s.shorten_timeout()
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            accelerator.gather(loss.detach())


@row(
    "`accelerator.gather` under `if accelerator.is_main_process:`, at the script's end",
    error("not every rank made this call"),
    single=EQUAL,
)
def gathers_alone_at_the_end(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        accelerator.gather(torch.zeros(1))


@row(
    "`accelerator.wait_for_everyone` under `if accelerator.is_main_process:`",
    error("not every rank made this call"),
    single=EQUAL,
)
def waits_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()


@row("a `break` on one rank only", LEFT, single=None)
def breaks_alone(s: Script) -> None:
    s.shorten_timeout()
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        if accelerator.process_index == 1 and index == 4:
            break
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row(
    "a batch that only one rank skips with `continue`",
    single=None,
    ddp=warning("different places of their data"),
    fsdp=HANGS,
    tp=error("read different batches"),
)
def continues_alone(s: Script) -> None:
    s.shorten_timeout()
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        if accelerator.process_index == 1 and index == 0:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("an exception on one rank only", plain_error("ValueError: bad row"), single=None)
def fails_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for index, (inputs, targets) in enumerate(loader):
        if accelerator.process_index == 1 and index == 4:
            raise ValueError("bad row")
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("`prepare` under `if accelerator.is_main_process:`", error("do not fit together"), single=EQUAL)
def prepares_alone(s: Script) -> None:
    accelerator = s.start()
    parts = s.build(accelerator)
    if accelerator.is_main_process:
        parts = accelerator.prepare(*parts)
    train(accelerator, *parts)


@row(
    "an additional object prepared on one rank",
    error("on rank 1 only: rank 0 has continued to"),
    single=None,
    ddp=error("do not fit together"),
)
def prepares_more(s: Script) -> None:
    s.shorten_timeout()
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    other = s.loader(accelerator)
    if accelerator.is_main_process:
        model, optimizer, loader, other = accelerator.prepare(model, optimizer, loader, other)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train(accelerator, model, optimizer, loader)


@row(
    "`backward(loss, weight=n)` on one rank, `backward(loss)` on the others",
    error("weight= on some ranks only"),
    single=None,
)
def weighs_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss, weight=len(inputs) if accelerator.is_main_process else None)
            optimizer.step()
            optimizer.zero_grad()


@row(
    "`reduction='sum'` on one rank, for a loss that is a mean",
    single=None,
    tp=None,
    ddp=DIFFERENT_REDUCTIONS,
    fsdp=DIFFERENT_REDUCTIONS,
)
def sums_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            accelerator.backward(loss, reduction="sum" if accelerator.is_main_process else "mean")
            optimizer.step()
            optimizer.zero_grad()


@row(
    "`clip_grad_norm_` under `if accelerator.is_main_process and accelerator.sync_gradients:`",
    error("do not fit together"),
    single=None,
)
def clips_alone(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.is_main_process and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@row("`clip_grad_value_` with a different limit on each rank", error("do not fit together"), single=None)
def clamps_differently(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            accelerator.clip_grad_value_(model.parameters(), 0.1 * (1 + accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()


@row("tensors of different shapes gathered", error("do not fit together"), single=EQUAL)
def gathers_shapes(s: Script) -> None:
    accelerator, *parts = s.prepare_all()
    accelerator.gather(torch.zeros(2, 3 + accelerator.process_index))
    train(accelerator, *parts)


@row("a different `gradient_accumulation_steps` on one rank", error("ranks have different settings"), single=None)
def steps_by_rank(s: Script) -> None:
    accelerator = s.start(steps=1 if s.rank else 2)
    train(accelerator, *accelerator.prepare(*s.build(accelerator)))


@row("a different learning rate on one rank", error("rank"), single=None, fsdp=None, tp=None)
def lr_by_rank(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + accelerator.process_index)
    train(accelerator, model, optimizer, loader)


@row("a different `mixed_precision` on one rank", error("ranks have different settings"), single=None)
def precision_by_rank(s: Script) -> None:
    accelerator = s.start(mixed_precision="bf16" if s.rank else "no")
    train(accelerator, *accelerator.prepare(*s.build(accelerator)))
