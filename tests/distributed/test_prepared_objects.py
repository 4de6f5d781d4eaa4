"""Prepared objects on two processes, as scripts use them: windows closed by hand, `module`, freezing, repeated losses.

All scenarios run in one pair of processes. Each scenario is reported as a separate test.
"""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DistributedDataParallelKwargs
from headway.errors import PrepareError, StateError
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import (
    are_equal_on_ranks,
    assert_warned_once,
    capture_warnings,
    flatten_weights,
    make_data,
    make_parts,
    run_scenarios,
    train_plain_windows,
)

# -------------------------------------------------------------------- windows closed by hand


def windows_closed_by_hand() -> None:
    """With Accelerator(k), backward outside `accumulate` and a step after every k-th batch, losses are divided by k."""
    for keeps_local in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(*make_parts())
        with capture_warnings() as warnings:
            for number, (inputs, targets) in enumerate(loader, start=1):
                is_end = number % accelerator.gradient_accumulation_steps == 0
                if keeps_local and not is_end:
                    with model.no_sync():
                        accelerator.backward(mse_loss(model(inputs), targets))
                else:
                    accelerator.backward(mse_loss(model(inputs), targets))
                assert accelerator.sync_gradients
                if is_end:
                    accelerator.clip_grad_norm_(model.parameters(), 1e9)
                    optimizer.step()
                    optimizer.zero_grad()
        assert_warned_once(warnings, "outside accumulate()", "divided by 2")
        assert accelerator.num_updates == 2
        assert are_equal_on_ranks(accelerator, model)
        torch.testing.assert_close(flatten_weights(model), train_plain_windows(12))


# -------------------------------------------------------------------- attributes of DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Holder(nn.Module):
    """A user's wrapper that defines `module` and `no_sync` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def no_sync(self) -> str:
        return "mine"


def module_and_no_sync() -> None:
    for options in ({}, {"mixed_precision": "bf16"}, {"microbatching": "auto"}):
        accelerator = Accelerator(cpu=True, **options)
        bare = Net()
        looks = (repr(bare), list(bare.state_dict()), set(bare.__dict__), [name for name, _ in bare.named_modules()])
        model = accelerator.prepare(bare)
        assert model.module is model
        assert model.module.layer is model.layer
        keys = set(model.__dict__) - {"_headway_call"}
        assert looks == (repr(model), list(model.state_dict()), keys, [name for name, _ in model.named_modules()])
        store = io.BytesIO()
        torch.save(model, store)
        store.seek(0)
        for twin in (copy.deepcopy(model), torch.load(store, weights_only=False)):
            assert type(twin) is Net
            assert not hasattr(twin, "module")
            assert not hasattr(twin, "no_sync")
        accelerator.free_memory()
        assert not hasattr(model, "module")


def unwrapping_loops_end() -> None:
    model = Accelerator(cpu=True).prepare(Net())
    opened = model
    while hasattr(opened, "module"):
        opened = opened.module
    assert opened is model
    assert model.module is model


def no_sync_keeps_gradients_local() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    x = torch.full((1, 3), 1.0 + accelerator.process_index)
    with model.no_sync():
        accelerator.backward(model(x).mean(), weight=1)
    local = accelerator.gather(model.layer.weight.grad.clone())
    assert local[:, 0].tolist() == [1.0, 2.0]
    accelerator.backward(model(x).mean(), weight=1)
    assert accelerator.gather(model.layer.weight.grad.clone())[:, 0].tolist() == [3.0, 3.0]


def names_of_the_model_win() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Holder())
    assert isinstance(model.module, nn.Linear)
    assert model.no_sync() == "mine"
    evaluated = accelerator.prepare_model(Net(), evaluation_mode=True)
    frozen = accelerator.prepare(Net().requires_grad_(False))
    assert not hasattr(evaluated, "module")
    assert not hasattr(frozen, "no_sync")


# -------------------------------------------------------------------- frozen after prepare


def frozen_after_prepare() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = make_parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = make_data()
    accelerator.backward(mse_loss(model(x), y))
    optimizer.step()
    before = flatten_weights(model)
    model[0].requires_grad_(False)
    accelerator.backward(mse_loss(model(x), y))
    with pytest.raises(
        StateError,
        match=r"2 parameters of (?:SGD|Sequential) \(0.weight, 0.bias\) were frozen after prepare\(\).*find_unused",
    ):
        optimizer.step()
    assert torch.equal(flatten_weights(model), before)
    with pytest.raises(
        StateError, match=r"2 parameters of Sequential \(0.weight, 0.bias\) were frozen after prepare"
    ) as reports:
        model(x)
    assert reports.value.__suppress_context__  # hides torch's error of twenty lines


def freezing_with_find_unused_parameters() -> None:
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model, optimizer, _ = make_parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    model[0].requires_grad_(False)
    x, y = make_data()
    for _ in range(3):
        accelerator.backward(mse_loss(model(x + accelerator.process_index), y))
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model)


def frozen_critic() -> None:
    """A critic is frozen while the generator learns, as in a GAN."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    generator, critic, first, second = accelerator.prepare(generator, critic, first, second)
    x = make_data()[0] * (1 + accelerator.process_index)
    for _ in range(3):
        critic.requires_grad_(False)
        accelerator.backward(critic(generator(x)).square().mean(), weight=1)
        first.step()
        first.zero_grad()
        critic.requires_grad_(True)
        accelerator.backward((critic(generator(x).detach()) - 1).square().mean(), weight=1)
        second.step()
        second.zero_grad()
    assert are_equal_on_ranks(accelerator, generator)
    assert are_equal_on_ranks(accelerator, critic)


# -------------------------------------------------------------------- a repeated loss value


def repeated_loss_value() -> None:
    """A script gathers loss.repeat(batch_size) in an epoch of 2 x 5 + 3 samples, whose last round has fewer samples."""
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    loader = accelerator.prepare(DataLoader(TensorDataset(make_data(13)[0]), batch_size=5))
    with capture_warnings() as warnings:
        gathered = [accelerator.gather_for_metrics(torch.tensor(1.0).repeat(5)) for _ in loader]
    assert sum(map(len, gathered)) == 13
    assert_warned_once(warnings, "gather_for_metrics got a tensor of shape (5,)")


# -------------------------------------------------------------------- a model on several devices


def dispatched_model() -> None:
    """A dispatched model cannot be replicated, whether or not it may be moved."""
    model = nn.Linear(2, 1)
    model.hf_device_map = {"weight": 0, "bias": 1}  # the devices are not used
    for placement in (None, [False]):
        with pytest.raises(PrepareError, match="so it cannot be one of 2 replicas"):
            Accelerator(cpu=True).prepare(model, device_placement=placement)
    assert Accelerator(cpu=True).prepare_model(model, device_placement=False, evaluation_mode=True) is model


SCENARIOS: list[Callable[[], None]] = [
    windows_closed_by_hand,
    module_and_no_sync,
    unwrapping_loops_end,
    no_sync_keeps_gradients_local,
    names_of_the_model_win,
    frozen_after_prepare,
    freezing_with_find_unused_parameters,
    frozen_critic,
    repeated_loss_value,
    dispatched_model,
]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2, SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)
