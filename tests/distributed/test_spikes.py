"""Two processes find planted bad batches on all ranks or on none, and going back leaves no trace of them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, NonFinitePolicy, PipelineOptions, SpikePolicy
from headway.errors import UnsupportedError
from tests.distributed.layouts import Block
from tests.distributed.ranks import run_ranks

SIZE, WORLD = 4, 2
ROWS = SIZE * WORLD
"""Rows per update, if each rank has its own rows."""
SPLIT = ("tp", "cp", "pp")
"""Strategies in which both ranks have the same rows, and parts of one model or of its sequences."""


def count_parts(strategy: str) -> int:
    """Return the number of ranks with their own rows."""
    return 1 if strategy in SPLIT else WORLD


def make_data(
    num_updates: int, bad: dict[int, str], seed: int, strategy: str = "ddp"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a noisy linear function. Rows of bad updates are spoiled on one rank only."""
    generator, parts = torch.Generator().manual_seed(seed), count_parts(strategy)
    shape = (4, 6) if strategy in SPLIT else (6,)
    x = torch.randn(num_updates * SIZE * parts, *shape, generator=generator)
    y = x.sum(-1, keepdim=True) + 0.3 * torch.randn(*x.shape[:-1], 1, generator=generator)
    for number, kind in bad.items():
        first = (number * parts + number % parts) * SIZE
        rows = slice(first, first + SIZE)
        if kind == "targets":
            y[rows] *= 200
        elif kind == "inputs":
            x[rows] *= 300
        else:
            y[rows] += 500 * torch.randn(y[rows].shape, generator=generator)
    return x, y


class SequenceModel(nn.Module):
    """Model with attention over sequences of 4, which every strategy can split."""

    def __init__(self, dropout: float, num_blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(16, 2, dropout) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        last: torch.Tensor = self.last(x)
        return last


def train(
    strategy: str, rows: tuple[torch.Tensor, torch.Tensor], on_spike: Any, with_clip: bool = False, dropout: float = 0.1
) -> tuple[Accelerator, list[int], dict[str, torch.Tensor]]:
    """Train over the rows once, in order. Return the number of updates before each batch, and the final state."""
    torch.manual_seed(0)
    handlers = [PipelineOptions(first=["first"], last=["last"])] if strategy == "pp" else []
    accelerator = Accelerator(cpu=True, strategy=strategy, on_spike=on_spike, kwargs_handlers=handlers)
    line = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
    model = SequenceModel(dropout, 1 if strategy == "tp" else 2) if strategy in SPLIT else line
    model.register_buffer("calls", torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4000)
    loader = DataLoader(TensorDataset(*rows), batch_size=SIZE)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    before = []
    for x, y in loader:
        before.append(accelerator.num_updates)
        with accelerator.accumulate(model):
            model.calls += 1
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if with_clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    state = {f"model {name}": value for name, value in accelerator.get_state_dict(model).items()}
    state["calls"] = model.calls.clone()
    for number, each in enumerate(optimizer.state.values()):
        for name, value in each.items():
            own = value.to_local() if hasattr(value, "to_local") else value
            state[f"optimizer {number} {name}"] = own.clone()
    state["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    state["next draw"] = torch.rand(())
    return accelerator, before, state


KINDS = ("targets", "inputs", "noise")


def check_skipped_updates(strategy: str, seed: int, with_clip: bool) -> int:
    generator = torch.Generator().manual_seed(seed)
    bad, number = {}, 40
    while number < 130:
        bad[number] = KINDS[len(bad) % 3]
        number += 4 + int(torch.randint(4, (), generator=generator))
    accelerator, before, _ = train(strategy, make_data(140, bad, seed), "skip", with_clip)
    after = [*before[1:], accelerator.num_updates]
    left_out = [number for number, (one, other) in enumerate(zip(before, after)) if one == other]
    assert left_out == list(bad)
    assert accelerator.spikes is not None
    assert accelerator.spikes.num_spikes == len(bad)
    assert accelerator.non_finite is None
    return len(bad)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("seed", "with_clip"), [(0, False), (1, True)])
def test_planted_bad_batches_are_skipped(strategy, seed, with_clip):
    """The four cases have more than 50 bad batches. None may be missed, and no good batch may be skipped."""
    (found, _) = run_ranks(check_skipped_updates, WORLD, strategy, seed, with_clip)
    assert found >= 13


def list_differences(
    strategy: str, left_out: set[int], num: int, rows: Any, state: dict[str, torch.Tensor], dropout: float = 0.1
) -> list[str]:
    """Return the names of values that differ from a run whose data never had the updates in `left_out`."""
    size = SIZE * count_parts(strategy)
    index = [i * size + j for i in range(num) if i not in left_out for j in range(size)]
    other, _, expected = train(strategy, tuple(each[index] for each in rows), None, dropout=dropout)  # type: ignore[arg-type]
    assert other.num_updates == num - len(left_out)
    assert state.keys() == expected.keys()
    return [name for name in state if not torch.equal(state[name], expected[name])]


def skip_batches(strategy: str) -> None:
    if strategy == "pp":
        with pytest.raises(UnsupportedError, match="use on_spike='skip'"):
            Accelerator(cpu=True, strategy=strategy, on_spike="go_back")
    bad = {35: "noise", 36: "targets"}
    rows = make_data(42, bad, 3, strategy)
    accelerator, _, state = train(strategy, rows, "skip", dropout=0.0)
    assert accelerator.spikes is not None
    assert accelerator.spikes.num_spikes == 2
    assert accelerator.num_updates == 40
    different = list_differences(strategy, set(bad), 42, rows, state, dropout=0.0)
    assert set(different) <= {"calls", "model calls"}, different  # the script's own counter


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_skipping_leaves_the_state_of_a_run_without_the_batches(strategy):
    run_ranks(skip_batches, WORLD, strategy)


def go_back(strategy: str) -> None:
    kind = "noise" if strategy in SPLIT else "inputs"
    bad, num = {45: kind, 61: "targets", 63: "noise"}, 68
    if strategy not in SPLIT:
        bad, num = {**bad, 90: kind}, 100
    rows = make_data(num, bad, 3, strategy)
    accelerator, before, state = train(strategy, rows, SpikePolicy("go_back", updates=5))
    left_out = set()
    for number in bad:
        back_to = before[number + 1]
        first = max(i for i in range(number + 1) if before[i] == back_to and i not in left_out)
        assert (
            (5 if number != 63 else 1) <= number - first < 10
        )  # the second of two close spikes goes back to the same point
        left_out.update(range(first, number + 1))
    assert accelerator.num_updates == num - len(left_out)
    different = list_differences(strategy, left_out, num, rows, state)
    assert not different, different


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "cp"])
def test_going_back_leaves_the_state_of_a_run_without_the_batches(strategy):
    run_ranks(go_back, WORLD, strategy)


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class SquareRoot(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def find_origin(strategy: str, in_backward: bool) -> tuple[str, str, tuple[int, ...], int]:
    """Return the operation, module, rows and rank that produced a NaN. It comes from the third row of rank 1."""
    torch.manual_seed(0)
    policy = NonFinitePolicy("skip", explains=True)
    accelerator = Accelerator(cpu=True, strategy=strategy, on_non_finite=policy)
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Sequential(SquareRoot() if in_backward else Log()), nn.Linear(4, 1)
    )
    nn.init.eye_(model[0].weight)
    x = torch.ones(3 * ROWS, 4)
    x[ROWS + SIZE + 2] = 0
    loader = DataLoader(TensorDataset(x), batch_size=SIZE)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    for (rows,) in loader:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.num_updates == 2
    assert accelerator.non_finite is not None
    found = accelerator.non_finite.origin
    assert found is not None
    return found.operation, found.module, found.rows, found.rank


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_whose_forward_produced_a_nan_is_named(strategy):
    for found in run_ranks(find_origin, WORLD, strategy, False):
        assert found == ("aten.log", "1.0", (2,), 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_whose_backward_produced_a_nan_is_named(strategy):
    for found in run_ranks(find_origin, WORLD, strategy, True):
        assert found == ("aten.div in SqrtBackward0", "1.0", (2,), 1)
