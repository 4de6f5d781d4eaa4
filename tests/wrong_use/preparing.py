"""Mistakes in what is passed to `prepare`, and in how it is called."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from headway import Accelerator
from tests.wrong_use.row import EQUAL, Section, error, plain_error, warning
from tests.wrong_use.script import Script, net, sgd, train, windows

section = Section("What is prepared")
row = section.row


@row("prepared twice", EQUAL)
def prepared_twice(s: Script) -> None:
    accelerator, *prepared = s.prepare_all()
    train(accelerator, *accelerator.prepare(*prepared))


@row("prepared one by one", EQUAL)
def one_by_one(s: Script) -> None:
    accelerator = s.start()
    train(accelerator, *(accelerator.prepare(part) for part in s.build(accelerator)))


@row("the optimizer prepared before its model", EQUAL)
def optimizer_first(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    optimizer = accelerator.prepare(optimizer)
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)


@row("results of `prepare` assigned in another order", plain_error("'PreparedOptimizer' object is not callable"))
def another_order(s: Script) -> None:
    accelerator = s.start()
    optimizer, model, loader = accelerator.prepare(*s.build(accelerator))
    train(accelerator, model, optimizer, loader)


@row(
    "results of `prepare` not assigned, so each rank reads all data",
    EQUAL,
    ddp=warning("not prepared"),
    fsdp=warning("not prepared"),
)
def results_left(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, loader = s.build(accelerator)
    accelerator.prepare(model, optimizer, loader)
    train(accelerator, model, optimizer, loader)


READS_ALL = warning("DataLoader of TensorDataset that is not prepared")


@row("a loader that is not prepared", EQUAL, ddp=READS_ALL, fsdp=READS_ALL)
def loader_left_out(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    train(accelerator, *accelerator.prepare(model, optimizer), loader)


@row("an optimizer that is not prepared, with accumulation", error("stepped inside an accumulation window"))
def optimizer_left_out(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)


@row(
    "an optimizer that is not prepared, one batch per update",
    error("SGD"),
    single=EQUAL,
    ddp=warning("SGD is not prepared"),
)
def optimizer_left_out_without_windows(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, loader = s.build(accelerator)
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader)


@row("a model that is not prepared", error("belong to no prepared model"), single=EQUAL)
def model_left_out(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, loader = s.build(accelerator)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


DRIFTS = warning("SGD updates parameters of a model that is not prepared")


@row("nothing prepared", DRIFTS, single=EQUAL)
def nothing_prepared(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, loader = s.build(accelerator)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


@row("nothing prepared, `loss.backward()`", DRIFTS, single=EQUAL)
def nothing_prepared_at_all(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, loader = s.build(accelerator)
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@row("`accumulate` with a model that is not prepared", error("belong to no prepared model"), single=EQUAL)
def accumulates_another(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    train(accelerator, model, optimizer, loader)


@row("`accumulate()` without a model", EQUAL)
def accumulates_nothing(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate():
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("`accumulate` with the optimizer", EQUAL)
def accumulates_the_optimizer(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(optimizer):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


STRANGERS = error("belong to no prepared model")


@row("the optimizer of a copy of the model", STRANGERS)
def optimizer_of_a_copy(s: Script) -> None:
    accelerator = s.start()
    model, _, loader = s.build(accelerator)
    optimizer = sgd(copy.deepcopy(model))
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row("an optimizer built before a layer was replaced", STRANGERS)
def layer_replaced(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model.down = nn.Linear(8, 2)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


def train_with_added_layer(_: Script) -> nn.Module:
    model = net()
    torch.manual_seed(3)
    extra = nn.Linear(2, 2)
    optimizer = sgd(nn.ModuleList([model, extra]))
    for inputs, targets in windows():
        mse_loss(extra(model(inputs)), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.up


@row(
    "a layer added to the model after prepare, and to the optimizer by `add_param_group`",
    error("belong to no prepared model"),
    single=EQUAL,
    by_hand=train_with_added_layer,
)
def layer_added(s: Script) -> Any:
    accelerator, model, optimizer, loader = s.prepare_all()
    torch.manual_seed(3)
    model.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model.extra.parameters()})
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model.extra(model(inputs)), targets))
            optimizer.step()
            optimizer.zero_grad()
    return model.up


@row("`DistributedDataParallel` passed to `prepare`", error("give the bare model"), single=None)
def wrapped_by_hand(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    model = nn.parallel.DistributedDataParallel(model)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row("a list of objects passed to `prepare`", warning("which is not a model"))
def list_prepared(s: Script) -> Any:
    accelerator = s.start()
    accelerator.prepare(list(s.build(accelerator)))
    accelerator.wait_for_everyone()


@row("a dataset passed to `prepare` instead of its loader", warning("which is not a model"))
def dataset_prepared(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, loader = s.build(accelerator)
    accelerator.prepare(model, optimizer, loader.dataset)


@row("two Accelerators: the optimizer prepared by the other one", error("stepped inside an accumulation window"))
def prepared_elsewhere(s: Script) -> None:
    first, second = s.start(), s.start(steps=1)
    model, optimizer, loader = s.build(first)
    optimizer = second.prepare(optimizer)
    model, loader = first.prepare(model, loader)
    train(first, model, optimizer, loader)


@row("two Accelerators: the loader prepared by the other one", EQUAL)
def loader_prepared_elsewhere(s: Script) -> None:
    first, second = s.start(), s.start()
    model, optimizer, loader = s.build(first)
    loader = second.prepare(loader)
    train(first, *first.prepare(model, optimizer), loader)


@row("a new Accelerator for each epoch", EQUAL)
def new_accelerator(s: Script) -> None:
    model = s.model = net()
    optimizer = sgd(model)
    accelerator: Accelerator = s.start()
    train(accelerator, *accelerator.prepare(model, optimizer, s.loader(accelerator)))


def train_at_two_paces(_: Script) -> list[nn.Module]:
    """Train two models in plain PyTorch: the first makes an update for every two batches, the second for each batch."""
    found = []
    for seed, size in ((0, 8), (1, 4)):
        model = net(seed=seed)
        optimizer = sgd(model)
        for inputs, targets in windows(size):
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    return found


@row("two Accelerators, each with its own windows", EQUAL, by_hand=train_at_two_paces)
def two_paces(s: Script) -> Any:
    accelerators = s.start(), s.start(steps=1)
    loader = accelerators[0].prepare(s.loader(accelerators[0]))
    models = net(seed=0), net(seed=1)
    prepared = [a.prepare(model, sgd(model)) for a, model in zip(accelerators, models)]
    for inputs, targets in loader:
        for accelerator, (model, optimizer) in zip(accelerators, prepared):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return list(models)


# -------------------------------------------------------------------- correct uses


@row("nothing prepared, the script's own `DistributedDataParallel`", EQUAL, single=None, fsdp=None, tp=None)
def own_engine(s: Script) -> Any:
    accelerator = s.start(steps=1)
    model = net()
    engine = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(model)
    for inputs, targets in windows():
        mine = slice(s.rank * 4, s.rank * 4 + 4)
        accelerator.backward(mse_loss(engine(inputs[mine]), targets[mine]))
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("a second model that only the main process trains, after the run", EQUAL, fsdp=None, tp=None)
def own_probe(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    train(accelerator, model, optimizer, loader)
    if accelerator.is_main_process:
        probe = nn.Linear(2, 1)
        rule = torch.optim.SGD(probe.parameters(), lr=0.1)
        for inputs, _ in windows(4):
            with torch.no_grad():
                seen = model(inputs)
            probe(seen).square().mean().backward()
            rule.step()
    accelerator.wait_for_everyone()


def train_last_layer(s: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model.down)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("a trainable layer that no optimizer updates", warning("no optimizer updates them"), by_hand=train_last_layer)
def layer_without_optimizer(s: Script) -> None:
    accelerator = s.start()
    s.model = net()
    model, optimizer, loader = accelerator.prepare(s.model, sgd(s.model.down), s.loader(accelerator))
    train(accelerator, model, optimizer, loader)


def train_without_optimizer_for_one_layer(s: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model.down)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_by_hand(model.up)
    return model


def update_by_hand(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


@row(
    "a layer that the script updates by hand, without an optimizer",
    EQUAL,
    by_hand=train_without_optimizer_for_one_layer,
)
def layer_updated_by_hand(s: Script) -> None:
    accelerator = s.start()
    s.model = net()
    model, optimizer, loader = accelerator.prepare(s.model, sgd(s.model.down), s.loader(accelerator))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                update_by_hand(model.up)
