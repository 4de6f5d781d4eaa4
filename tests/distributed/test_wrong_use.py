"""Two processes and scripts that use them in a way which looks right: what is silently wrong is noticed, what is legitimate is not.

All scenarios run in one pair of processes; each is a test of its own.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset

from headway import Accelerator
from headway.errors import StateError
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

# -------------------------------------------------------------------- an optimizer that is not prepared


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, how: str = "accumulate") -> None:
    """One epoch of the ordinary loop."""
    for inputs, targets in loader:
        with accelerator.accumulate(model) if how == "accumulate" else nullcontext():
            loss = mse_loss(model(inputs), targets)
            loss.backward() if how == "by hand" else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def an_optimizer_that_is_not_prepared_in_a_window() -> None:
    """It would step on this process's own gradient, of one micro-batch of two."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = parts()
    model, loader = accelerator.prepare(model, loader)
    before = weights(model)
    with pytest.raises(
        StateError, match=r"SGD stepped inside an accumulation window.*prepare it together with its model"
    ):
        train(accelerator, model, optimizer, loader)
    assert torch.equal(weights(model), before)


def an_optimizer_that_is_not_prepared() -> None:
    """The weights are right; what is missing is said once."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts()
    model, loader = accelerator.prepare(model, loader)
    with listening() as said:
        train(accelerator, model, optimizer, loader)
    assert_said(said, "SGD is not prepared, but its model is", "checkpoints lack its state")
    assert len(said) <= 1
    assert are_equal_on_ranks(accelerator, model)
    torch.testing.assert_close(weights(model), plain_windows(6))


def under_fp16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, loader = parts()
    model, loader = accelerator.prepare(model, loader)
    before = weights(model)
    with pytest.raises(StateError, match=r"SGD stepped on gradients that are multiplied by fp16's loss scale"):
        train(accelerator, model, optimizer, loader)
    assert torch.equal(weights(model), before)
    # The user's own hand on the scaler is fine.
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.precision.scaler.step(other)
        accelerator.precision.scaler.update()
        other.zero_grad()
    assert weights(model).isfinite().all()


# -------------------------------------------------------------------- nothing prepared


def nothing_is_prepared(how: str) -> None:
    """Weights drift apart from the first update on; it is said before the second."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts()
    x, y = data()
    with listening() as said:
        for number in range(2):
            piece = slice(accelerator.process_index, None, accelerator.num_processes)
            loss = mse_loss(model(x[piece]), y[piece])
            loss.backward() if how == "by hand" else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                assert_said(said, "SGD updates parameters of a model that is not prepared", "weights drift apart")
    assert len(said) <= 1
    assert not are_equal_on_ranks(accelerator, model)


def nothing_is_prepared_with_our_backward() -> None:
    nothing_is_prepared("ours")


def nothing_is_prepared_with_plain_backward() -> None:
    nothing_is_prepared("by hand")


def one_of_two_models_is_not_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    critic = nn.Linear(1, 1)
    other = torch.optim.Adam(critic.parameters())
    with listening() as said:
        for inputs, targets in loader:
            accelerator.backward(critic(model(inputs)).sub(targets).square().mean())
            optimizer.step()
            accelerator.backward(critic(model(inputs).detach()).square().mean())
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
    assert_said(said, "Adam updates parameters of a model that is not prepared")


def what_trains_elsewhere_is_nobodys_business() -> None:
    """A probe of the main process's own; the user's own DDP; parameters without gradients."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    train(accelerator, model, optimizer, loader)
    with listening() as said:
        if accelerator.is_main_process:
            probe = nn.Linear(1, 1)
            rule = torch.optim.SGD(probe.parameters(), lr=0.1)
            for inputs in DataLoader(data()[0], batch_size=4, sampler=Own(24)):
                with torch.no_grad():
                    seen = model(inputs)
                probe(seen).square().mean().backward()
                rule.step()
        accelerator.wait_for_everyone()
    assert not said
    other = Accelerator(cpu=True)
    wrapped = nn.parallel.DistributedDataParallel(parts()[0])
    rule = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with listening() as said:
        other.backward(wrapped(data()[0] + other.process_index).square().mean())
        rule.step()
    assert not said
    assert are_equal_on_ranks(other, wrapped)


# -------------------------------------------------------------------- loaders that are not prepared


class Own(Sampler[int]):
    """A sampler that knows its rank."""

    def __init__(self, count: int) -> None:
        self.indices = range(torch.distributed.get_rank(), count, torch.distributed.get_world_size())

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class OwnStream(IterableDataset):
    """A stream that shards itself by rank; or an environment's rollouts."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = range(torch.distributed.get_rank(), 24, torch.distributed.get_world_size())
        return iter([(data()[0][i], data()[1][i]) for i in rows])


def a_training_loader_that_is_not_prepared() -> None:
    for how in ("accumulate", "ours"):
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = parts()
        model, optimizer = accelerator.prepare(model, optimizer)
        with listening() as said:
            train(accelerator, model, optimizer, loader, how)
        assert_said(said, "DataLoader of TensorDataset that is not prepared", "all of its 24 samples", "setLevel")
        assert len(said) <= 1
        assert optimizer.num_updates == 8  # 24 / 3: every rank read everything


def an_evaluation_loader_that_is_not_prepared() -> None:
    """140 of 70 samples."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    held_out = DataLoader(TensorDataset(*data(70)), batch_size=8)
    with listening() as said:
        train(accelerator, model, optimizer, loader)
        assert not said
        with torch.no_grad():
            gathered = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in held_out]
    assert sum(map(len, gathered)) == 140
    assert_said(said, "DataLoader of TensorDataset that is not prepared", "all of its 70 samples")
    assert len(said) <= 1


def data_that_is_split_already() -> None:
    """Split by hand, by a sampler, by the stream itself, or no DataLoader at all: nothing is said."""
    rank = Accelerator(cpu=True).process_index
    whole = TensorDataset(*data())
    loaders: list[Any] = [
        DataLoader(Subset(whole, range(rank, 24, 2)), batch_size=3, shuffle=True),
        DataLoader(whole, batch_size=3, sampler=DistributedSampler(whole)),
        DataLoader(whole, batch_size=3, sampler=Own(24)),
        DataLoader(OwnStream(), batch_size=3),
        [(data()[0] + rank, data()[1])] * 2,
    ]
    for loader in loaders:
        accelerator = Accelerator(cpu=True)
        model, optimizer, _ = parts()
        model, optimizer = accelerator.prepare(model, optimizer)
        with listening() as said:
            train(accelerator, model, optimizer, loader)
            with torch.no_grad():
                for inputs, _ in loader:
                    accelerator.gather_for_metrics(model(inputs))
        assert not said
        del accelerator, model, optimizer


def after_the_loop() -> None:
    """Gathering what a whole pass has collected is not a batch of a loader that is not prepared."""
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(3, 1), parts()[2])
    with listening() as said, torch.no_grad():
        collected = torch.cat([model(inputs) for inputs, _ in loader])
        assert len(accelerator.gather_for_metrics(collected)) == 24
    assert not said


# -------------------------------------------------------------------- objects of two Accelerators


def a_loader_of_another_accelerator() -> None:
    """A helper function of the script made one of its own: weights, ends and paddings are known all the same."""
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=3), Accelerator(cpu=True)
    second.even_batches = False
    model, optimizer, plain = parts(num_rows=13, batch_size=5)
    model, optimizer = first.prepare(model, optimizer)
    loader = second.prepare(plain)
    rows = []
    for inputs, targets in loader:
        with first.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            first.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        rows.append(first.gather_for_metrics(inputs))
    assert torch.equal(torch.cat(rows), data(13)[0])
    assert first.num_updates == 1  # the loader's end closed the window
    bare, rule, _ = parts()
    mse_loss(bare(data(13)[0]), data(13)[1]).backward()
    rule.step()
    torch.testing.assert_close(weights(model), weights(bare))


def an_optimizer_of_another_accelerator() -> None:
    """Right where there are no windows to wait for, and refused inside one."""
    for steps in (1, 2):
        first, second = Accelerator(cpu=True, gradient_accumulation_steps=steps), Accelerator(cpu=True)
        model, optimizer, loader = parts()
        optimizer = second.prepare(optimizer)
        model, loader = first.prepare(model, loader)
        before = weights(model)
        if steps == 1:
            train(first, model, optimizer, loader)
            assert are_equal_on_ranks(first, model)
            torch.testing.assert_close(weights(model), plain_windows(6))
        else:
            with pytest.raises(StateError, match=r"SGD stepped inside an accumulation window.*same Accelerator"):
                train(first, model, optimizer, loader)
            assert torch.equal(weights(model), before)


def two_accelerators_with_windows_of_their_own() -> None:
    """A generator learns from every second batch and its critic from every one; the loader is the first's."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    twins = copy.deepcopy(models)
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=2), Accelerator(cpu=True)
    loader = first.prepare(parts()[2])
    made = [a.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1)) for a, m in zip((first, second), models, strict=True)]
    with listening() as said:
        for inputs, targets in loader:
            for accelerator, (model, optimizer) in zip((first, second), made, strict=True):
                with accelerator.accumulate(model):
                    accelerator.backward(mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
    assert not said
    assert (first.num_updates, second.num_updates) == (2, 4)
    x, y = data()
    for twin, model, size in zip(twins, models, (12, 6), strict=True):
        rule = torch.optim.SGD(twin.parameters(), lr=0.1)
        for start in range(0, 24, size):
            rule.zero_grad()
            mse_loss(twin(x[start : start + size]), y[start : start + size]).backward()
            rule.step()
        torch.testing.assert_close(weights(model), weights(twin))


SCENARIOS: list[Callable[[], None]] = [
    an_optimizer_that_is_not_prepared_in_a_window,
    an_optimizer_that_is_not_prepared,
    under_fp16,
    nothing_is_prepared_with_our_backward,
    nothing_is_prepared_with_plain_backward,
    one_of_two_models_is_not_prepared,
    what_trains_elsewhere_is_nobodys_business,
    a_training_loader_that_is_not_prepared,
    an_evaluation_loader_that_is_not_prepared,
    data_that_is_split_already,
    after_the_loop,
    a_loader_of_another_accelerator,
    an_optimizer_of_another_accelerator,
    two_accelerators_with_windows_of_their_own,
]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(play, 2, SCENARIOS)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str, failures: list[dict[str, str]]) -> None:
    told = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not told, "\n".join(told)
