"""Mistakes in reading data and in computing metrics."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from headway import set_seed
from tests.wrong_use.row import EQUAL, Section, error, warning
from tests.wrong_use.script import ROWS, Script, make_data, net, sgd, train, windows

section = Section("Data and metrics")
row = section.row


# -------------------------------------------------------------------- data that is split twice or not at all


@row("the script's own `DistributedSampler`, in a loader that is not prepared", EQUAL, tp=None)
def own_sampler(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    whole = TensorDataset(*make_data())
    sampler = DistributedSampler(whole, s.shards, accelerator.process_index, shuffle=False)
    loader = DataLoader(whole, batch_size=4 // s.shards, sampler=sampler)
    train(accelerator, *accelerator.prepare(model, optimizer), loader)


@row("the script's own `DistributedSampler`, in a prepared loader", error("DistributedSampler"), single=EQUAL, tp=None)
def own_sampler_prepared(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    whole = TensorDataset(*make_data())
    sampler = DistributedSampler(whole, s.shards, accelerator.process_index, shuffle=False)
    loader = DataLoader(whole, batch_size=4 // s.shards, sampler=sampler)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


OWN = error("ranks gave prepare() different data")


@row("each rank's own part of the data, in a prepared loader", OWN, single=EQUAL, tp=None)
def split_by_hand(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    part = Subset(TensorDataset(*make_data()), range(accelerator.process_index, ROWS, s.shards))
    loader = DataLoader(part, batch_size=4 // s.shards)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row("different data on each rank, in a prepared loader", OWN, single=EQUAL, tp=None)
def own_data(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    inputs, targets = make_data()
    loader = DataLoader(TensorDataset(inputs + accelerator.process_index, targets), batch_size=4 // s.shards)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


@row(
    "a sampler that picks each rank's part, in a prepared loader",
    error("the ranks' samplers"),
    single=EQUAL,
    tp=None,
)
def strided_sampler(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    own: list[int] = list(range(accelerator.process_index, ROWS, s.shards))
    loader = DataLoader(TensorDataset(*make_data()), batch_size=4 // s.shards, sampler=own)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


class Stream(IterableDataset[Any]):
    """An iterable dataset that returns only the rows of its rank."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __iter__(self) -> Iterator[Any]:
        yield from list(zip(*make_data()))[self.rank :: self.count]


@row("a stream that splits itself by rank, in a loader that is not prepared", EQUAL, tp=None)
def own_stream(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    loader = DataLoader(Stream(accelerator.process_index, s.shards), batch_size=4 // s.shards)
    train(accelerator, *accelerator.prepare(model, optimizer), loader)


@row(
    "a stream that splits itself by rank, in a prepared loader",
    error("is not the same on all ranks"),
    single=EQUAL,
    tp=None,
)
def own_stream_prepared(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    loader = DataLoader(Stream(accelerator.process_index, s.shards), batch_size=4 // s.shards)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


def sum_all_rows(_: Script) -> torch.Tensor:
    return make_data()[0].sum(1).sort().values


@row("a different seed on each rank, with shuffled data", EQUAL, tp=None, by_hand=sum_all_rows)
def seeds_by_rank(s: Script) -> Any:
    accelerator = s.start()
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(s.loader(accelerator, shuffle=True))
    seen = torch.cat([accelerator.gather_for_metrics(inputs) for inputs, _ in loader])
    return seen.sum(1).sort().values


@row(
    "a different seed on each rank, with random initial weights",
    EQUAL,
    tp=warning("had different RNG states"),
)
def seeds_of_models(s: Script) -> None:
    accelerator = s.start()
    loader = s.loader(accelerator)
    s.model = model = net(seed=accelerator.process_index)
    train(accelerator, *accelerator.prepare(model, sgd(model), loader))


# -------------------------------------------------------------------- lengths


def train_on_27_rows(s: Script) -> nn.Module:
    """Train on 27 rows in plain PyTorch.

    The last batch is padded with the first row, and its weight is its number of real samples.
    """
    model = net()
    optimizer = sgd(model)
    inputs, targets = make_data(27)
    for start in range(0, 24, 8):
        mse_loss(model(inputs[start : start + 8]), targets[start : start + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [([24, 25, 26], 3)] if s.shards == 1 else [([24, 25], 2), ([26, 0], 1)]
    for rows, num_samples in batches:
        (mse_loss(model(inputs[rows]), targets[rows]) * num_samples / 3).backward()
    optimizer.step()
    return model


@row(
    "a dataset that does not divide evenly, so that the last batch is padded",
    EQUAL,
    by_hand=train_on_27_rows,
)
def uneven(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    train(accelerator, *accelerator.prepare(model, optimizer, s.loader(accelerator, 27)))


def train_on_one_row(_: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    inputs, targets = make_data(1)
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    return model


@row("fewer samples than ranks", EQUAL, by_hand=train_on_one_row)
def one_row(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    train(accelerator, *accelerator.prepare(model, optimizer, s.loader(accelerator, 1)))


def build_untrained(_: Script) -> nn.Module:
    return net()


@row("a loader without batches (`drop_last=True`, too few samples)", warning("gave no batch"), by_hand=build_untrained)
def empty(s: Script) -> None:
    accelerator = s.start()
    model, optimizer, _ = s.build(accelerator)
    loader = s.loader(accelerator, 1, drop_last=True)
    train(accelerator, *accelerator.prepare(model, optimizer, loader))


def train_on_first_batch(_: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    inputs, targets = next(windows(4))
    for _step in range(2):
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row("`next(iter(loader))` in each step, which always returns the first batch", EQUAL, by_hand=train_on_first_batch)
def first_batch_only(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for _ in range(4):
        inputs, targets = next(iter(loader))
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


@row("a prepared loader that only one rank reads", EQUAL)
def read_by_one(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    if accelerator.is_main_process:
        next(iter(loader))
    train(accelerator, model, optimizer, loader)


@row(
    "a shuffled prepared loader that only one rank reads",
    error("do not fit together"),
    single=EQUAL,
    tp=error("not every rank made this call"),
    by_hand=sum_all_rows,
)
def read_by_one_shuffled(s: Script) -> Any:
    accelerator = s.start()
    loader = accelerator.prepare(s.loader(accelerator, shuffle=True))
    if accelerator.is_main_process:
        next(iter(loader))
    seen = torch.cat([accelerator.gather_for_metrics(inputs) for inputs, _ in loader])
    return seen.sum(1).sort().values


def train_per_window(_: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    for inputs, targets in windows():
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@row(
    "unprepared loaders with batches of different sizes on the ranks",
    warning("Give backward(loss, weight=n)"),
    single=None,
    tp=None,
    by_hand=train_per_window,
)
def unequal_batches(s: Script) -> None:
    accelerator = s.start(steps=1)
    model, optimizer, _ = s.build(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, targets in windows():
        mine = slice(0, 2) if accelerator.process_index == 0 else slice(2, None)
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs[mine]), targets[mine]))
            optimizer.step()
            optimizer.zero_grad()


# -------------------------------------------------------------------- evaluation and metrics


@row("an evaluation without `torch.no_grad()`, in the middle of training", EQUAL)
def evaluates_with_gradients(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    held_out = accelerator.prepare(s.loader(accelerator, 9))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for x, _ in held_out:
            accelerator.gather_for_metrics(model(x))
        model.train()


def predict_held_out(_: Script) -> torch.Tensor:
    return net()(make_data(9)[0])


@row(
    "`gather` instead of `gather_for_metrics`, on a padded batch",
    warning("gather_for_metrics"),
    single=EQUAL,
    by_hand=predict_held_out,
)
def gathers_padding(s: Script) -> Any:
    accelerator, model, *_ = s.prepare_all()
    held_out = accelerator.prepare(s.loader(accelerator, 9))
    with torch.no_grad():
        return torch.cat([accelerator.gather(model(x)) for x, _ in held_out])


@row("`gather_for_metrics` on a padded batch", EQUAL, by_hand=predict_held_out)
def gathers_for_metrics(s: Script) -> Any:
    accelerator, model, *_ = s.prepare_all()
    held_out = accelerator.prepare(s.loader(accelerator, 9))
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in held_out])


@row("`gather_for_metrics` of one value for the whole batch", error("one value for the whole batch"))
def gathers_one_value(s: Script) -> Any:
    accelerator, model, *_ = s.prepare_all()
    held_out = accelerator.prepare(s.loader(accelerator, 9))
    with torch.no_grad():
        return [accelerator.gather_for_metrics(mse_loss(model(x), y)) for x, y in held_out]


@row(
    "an evaluation loader that is not prepared",
    EQUAL,
    ddp=warning("not prepared"),
    fsdp=warning("not prepared"),
    by_hand=predict_held_out,
)
def evaluates_unprepared(s: Script) -> Any:
    accelerator, model, *_ = s.prepare_all()
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in s.loader(accelerator, 9)])


@row(
    "an evaluation under `if accelerator.is_main_process:`",
    EQUAL,
    fsdp=error("on rank 0 only"),
    tp=error("on rank 0 only"),
)
def evaluates_on_one(s: Script) -> None:
    accelerator, model, optimizer, loader = s.prepare_all()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            with torch.no_grad():
                model(make_data(9)[0])


@row("`set_seed` on each rank with its rank, before prepare", EQUAL)
def set_seed_by_rank(s: Script) -> None:
    accelerator = s.start()
    set_seed(accelerator.process_index)
    train(accelerator, *accelerator.prepare(*s.build(accelerator)))
