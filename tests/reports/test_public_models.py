"""Tests of several models and unusual models: shared parameters, containers, and one encoder per kind of data."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DistributedDataParallelKwargs
from tests.distributed.ranks import RankFailed, run_ranks

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)
LOADER = {"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": 2}


def flatten(state):
    return torch.cat([value.flatten() for value in state.values()] or [torch.zeros(0)])


def build_pair(is_frozen=False):
    """Return two layers that share their weight and have their own biases."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.weight.requires_grad_(not is_frozen)
    return first, second


def list_trainable(*models):
    return list({id(p): p for model in models for p in model.parameters() if p.requires_grad}.values())


def compute_pair_loss(first, second, inputs, targets):
    return mse_loss(second(torch.tanh(first(inputs))).sum(1, keepdim=True), targets)


def train_pair(strategy, is_frozen=False):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    first, second = build_pair(is_frozen)
    optimizer = torch.optim.SGD(list_trainable(first, second), lr=0.1)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, DataLoader(**LOADER))
    for inputs, targets in loader:
        with accelerator.accumulate(first, second):
            accelerator.backward(compute_pair_loss(first, second, inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
    return flatten(accelerator.get_state_dict(first)), flatten(accelerator.get_state_dict(second))


def train_pair_by_hand(world_size, is_frozen=False):
    first, second = build_pair(is_frozen)
    optimizer = torch.optim.SGD(list_trainable(first, second), lr=0.1)
    for inputs, targets in zip(INPUTS.split(2 * world_size), TARGETS.split(2 * world_size)):
        compute_pair_loss(first, second, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flatten(first.state_dict()), flatten(second.state_dict())


@pytest.mark.parametrize(
    ("strategy", "is_frozen"), [("ddp", False), ("fsdp", True)], ids=["ddp", "fsdp, frozen shared weight"]
)
def test_parameter_shared_by_two_models_trains_like_plain_pytorch(strategy, is_frozen):
    states = run_ranks(train_pair, 2, strategy, is_frozen)
    torch.testing.assert_close(states[0], train_pair_by_hand(2, is_frozen))


def test_parameter_shared_by_two_models_trains_like_plain_pytorch_on_one_process():
    torch.testing.assert_close(run_ranks(train_pair, 1, "fsdp")[0], train_pair_by_hand(1))


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp=2"])
def test_trainable_parameter_shared_by_two_sharded_models_raises(strategy):
    """Before, it silently became two parameters, and only one of them was trained."""
    with pytest.raises(RankFailed, match=r"Linear shares trainable parameters \(weight\)"):
        run_ranks(train_pair, 2, strategy)


def train_container(kind, strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4), nn.Linear(4, 1)]
    model = nn.ModuleList(parts) if kind is nn.ModuleList else nn.ModuleDict(dict(zip("ab", parts)))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(**LOADER))

    def run(layers, inputs):
        first, second = layers.values() if isinstance(layers, nn.ModuleDict) else layers
        return second(torch.tanh(first(inputs)))

    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(run(accelerator.unwrap_model(model), inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    num_rows = 4 * accelerator.num_processes
    for inputs, targets in zip(INPUTS.split(num_rows), TARGETS.split(num_rows)):
        mse_loss(run(plain, inputs), targets).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    return flatten(accelerator.get_state_dict(model)), flatten(plain.state_dict())


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_in_a_container_without_forward_train_like_plain_pytorch(kind, world_size):
    weights, expected = run_ranks(train_container, world_size, kind, "ddp")[0]
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_container_without_forward_cannot_be_sharded(kind):
    with pytest.raises(RankFailed, match=f"PrepareError: {kind.__name__} has no forward"):
        run_ranks(train_container, 2, kind, "fsdp")


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs, kind):
        return (self.texts if kind else self.images)(inputs)


def train_encoders(num_steps, choose_kind, is_prepared_separately=False):
    """Train on two kinds of batches, each with its own encoder. Return the weights."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps, kwargs_handlers=[handler])
    whole = Encoders()
    models = [whole.images, whole.texts] if is_prepared_separately else [whole]
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    *models, optimizer, loader = accelerator.prepare(*models, optimizer, DataLoader(**LOADER))
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(*models):
            kind = choose_kind(index, accelerator.process_index)
            output = models[kind](inputs) if is_prepared_separately else models[0](inputs, kind)
            accelerator.backward(mse_loss(output, targets))
            optimizer.step()
            optimizer.zero_grad()
    return flatten(whole.state_dict())


def train_encoders_by_hand(num_steps, choose_kind, world_size):
    model = Encoders()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(INPUTS.split(2), TARGETS.split(2)))
    for index in range(len(batches) // world_size):
        for rank in range(world_size):
            inputs, targets = batches[index * world_size + rank]
            loss = mse_loss(model(inputs, choose_kind(index, rank)), targets)
            (loss / world_size / num_steps).backward()
        if (index + 1) % num_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return flatten(model.state_dict())


def alternate_ranks(index, rank):
    return (index + rank) % 2


def begin_with_texts(index, rank):
    return (index + 1) % 2


def differ_on_the_second_rank(index, rank):
    return index % 2 if rank else 0


@pytest.mark.parametrize("choose_kind", [alternate_ranks, begin_with_texts, differ_on_the_second_rank])
@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.matrix
def test_one_encoder_for_each_kind_of_batch_trains_like_plain_pytorch(choose_kind, num_steps):
    """Covers windows whose last micro-batch uses one encoder only. torch averages only that encoder's gradients there."""
    weights_of_ranks = run_ranks(train_encoders, 2, num_steps, choose_kind)
    expected = train_encoders_by_hand(num_steps, choose_kind, 2)
    for each in weights_of_ranks:
        torch.testing.assert_close(each, expected)


def test_encoders_prepared_separately_raise():
    """Ranks that use different models would average gradients that do not belong together."""
    with pytest.raises(RankFailed, match="the ranks computed their losses with different models"):
        run_ranks(train_encoders, 2, 1, alternate_ranks, True)
