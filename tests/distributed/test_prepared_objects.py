"""What prepared objects do on two processes where scripts rely on it: windows closed by hand, `module`, freezing, repeated losses.

All scenarios run in one pair of processes; each is a test of its own.
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
    assert_said,
    data,
    listening,
    parts,
    plain_windows,
    play,
    weights,
)

# -------------------------------------------------------------------- windows closed by hand


def windows_closed_by_hand() -> None:
    """Accelerator(k), backward outside accumulate and a step every k-th time: the loss is divided by k."""
    for keeps_local in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(*parts())
        with listening() as said:
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
        assert_said(said, "outside accumulate()", "divided by 2")
        assert accelerator.num_updates == 2
        assert are_equal_on_ranks(accelerator, model)
        torch.testing.assert_close(weights(model), plain_windows(12))


# -------------------------------------------------------------------- what DistributedDataParallel has


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Holder(nn.Module):
    """A wrapper of the user's own, with both names taken."""

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


def scripts_that_open_wrappers_come_to_an_end() -> None:
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


def own_names_win() -> None:
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
    model, optimizer, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data()
    accelerator.backward(mse_loss(model(x), y))
    optimizer.step()
    before = weights(model)
    model[0].requires_grad_(False)
    accelerator.backward(mse_loss(model(x), y))
    with pytest.raises(
        StateError,
        match=r"2 parameters of (?:SGD|Sequential) \(0.weight, 0.bias\) were frozen after prepare\(\).*find_unused",
    ):
        optimizer.step()
    assert torch.equal(weights(model), before)
    with pytest.raises(
        StateError, match=r"2 parameters of Sequential \(0.weight, 0.bias\) were frozen after prepare"
    ) as told:
        model(x)
    assert told.value.__suppress_context__  # none of torch's twenty lines


def freezing_where_it_is_allowed() -> None:
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model, optimizer, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    model[0].requires_grad_(False)
    x, y = data()
    for _ in range(3):
        accelerator.backward(mse_loss(model(x + accelerator.process_index), y))
        optimizer.step()
        optimizer.zero_grad()
    assert are_equal_on_ranks(accelerator, model)


def a_model_frozen_as_a_whole_for_a_while() -> None:
    """A critic whose parameters rest while the generator learns."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
    generator, critic, first, second = accelerator.prepare(generator, critic, first, second)
    x = data()[0] * (1 + accelerator.process_index)
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


# -------------------------------------------------------------------- one value for the batch, repeated


def a_repeated_loss() -> None:
    """loss.repeat(batch_size) in an epoch of 2 x 5 + 3 samples, whose last round is not completed."""
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    loader = accelerator.prepare(DataLoader(TensorDataset(data(13)[0]), batch_size=5))
    with listening() as said:
        gathered = [accelerator.gather_for_metrics(torch.tensor(1.0).repeat(5)) for _ in loader]
    assert sum(map(len, gathered)) == 13
    assert_said(said, "gather_for_metrics got a tensor of shape (5,)")


# -------------------------------------------------------------------- a model on several devices


def a_dispatched_model() -> None:
    """It is no replica, wherever it is left."""
    model = nn.Linear(2, 1)
    model.hf_device_map = {"weight": 0, "bias": 1}  # type: ignore[assignment]  # the devices are not looked for
    for placement in (None, [False]):
        with pytest.raises(PrepareError, match="so it cannot be one of 2 replicas"):
            Accelerator(cpu=True).prepare(model, device_placement=placement)
    assert Accelerator(cpu=True).prepare_model(model, device_placement=False, evaluation_mode=True) is model


SCENARIOS: list[Callable[[], None]] = [
    windows_closed_by_hand,
    module_and_no_sync,
    scripts_that_open_wrappers_come_to_an_end,
    no_sync_keeps_gradients_local,
    own_names_win,
    frozen_after_prepare,
    freezing_where_it_is_allowed,
    a_model_frozen_as_a_whole_for_a_while,
    a_repeated_loss,
    a_dispatched_model,
]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(play, 2, SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not told, "\n".join(told)
