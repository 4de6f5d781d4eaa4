"""Accumulation windows on two processes: gradients equal those of the whole batch, however the ranks split it.

All scenarios run in one pair of processes. Each scenario is reported as a separate test.
"""

import copy
import random
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.core.config.torch_kwargs import GradScalerKwargs
from headway.core.training.windows import ConstantDivision
from headway.errors import ConfigError, LossError
from tests.devices import DEVICE, ON_CPU
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device


class Rows(IterableDataset):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(zip(self.x, self.y))


class Groups(Sampler[list[int]]):
    """Sampler of consecutive batches with the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


def make_data(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 3, generator=generator), torch.randn(num_rows, 1, generator=generator)


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def copy_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def compute_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of the mean loss over all rows, computed by plain PyTorch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    mse_loss(model(x), y).backward()
    return copy_gradients(model)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, check_device=False)


def check_epoch(loader: DataLoader, edges: list[int], x: torch.Tensor, y: torch.Tensor, steps: int, even: bool) -> None:
    """Train one epoch, and check the gradients right after each window's last backward pass.

    Args:
        loader: Loader of the rows.
        edges: Row numbers at which windows begin, and the number of rows.
        x: Inputs of all rows.
        y: Targets of all rows.
        steps: Micro-batches per window.
        even: `even_batches` of the configuration.
    """
    model = make_net()
    bare = copy.deepcopy(model)
    accelerator = Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(even_batches=even)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients:
                found.append(copy_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    assert len(found) == len(edges) - 1 == accelerator.num_updates
    for start, stop, gradient in zip(edges, edges[1:], found):
        assert_equal(gradient, compute_gradients(bare, x[start:stop], y[start:stop]))


def list_edges(num_rows: int, size: int) -> list[int]:
    return [*range(0, num_rows, size), num_rows]


# ---------------------------------------------------------------- scenarios, run on both ranks


def map_style() -> None:
    for num_rows, batch_size, steps, even in [
        (16, 4, 1, True), (16, 1, 8, True), (24, 2, 4, True), (20, 4, 2, True), (21, 4, 2, False), (19, 3, 4, False),
        (1, 4, 3, False), (17, 8, 1, False),
    ]:  # fmt: skip
        x, y = make_data(num_rows)
        loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
        check_epoch(loader, list_edges(num_rows, 2 * batch_size * steps), x, y, steps, even)


def streams() -> None:
    for num_rows, batch_size, steps, even in [(19, 3, 2, False), (16, 2, 3, True), (12, 4, 1, True)]:
        x, y = make_data(num_rows)
        loader = DataLoader(Rows(x, y), batch_size=batch_size)
        check_epoch(loader, list_edges(num_rows, 2 * batch_size * steps), x, y, steps, even)


def ragged_batches() -> None:
    for seed in range(6):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 11))]
        steps = draw.randint(1, 3)
        x, y = make_data(sum(sizes), seed)
        edges = [sum(sizes[:n]) for n in [*range(0, len(sizes), 2 * steps), len(sizes)]]
        check_epoch(DataLoader(TensorDataset(x, y), batch_sampler=Groups(sizes)), edges, x, y, steps, even=False)


def explicit_weights() -> None:
    """Check random item counts, including zero (for which a mean loss is NaN), with mean and sum reduction."""
    for seed in range(12):
        draw = random.Random(seed)
        steps, reduction = draw.randint(1, 3), draw.choice(["mean", "sum"])
        accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        for _ in range(3):
            counts = [[draw.randint(0, 5) * draw.randint(0, 1) for _ in range(2)] for _ in range(steps)]
            model.zero_grad()
            for pair in counts:
                mask = torch.arange(5, device=DEVICE).reshape(-1, 1) < pair[accelerator.process_index]
                with accelerator.accumulate(model):
                    total = (model(torch.arange(1.0, 6.0, device=DEVICE).reshape(-1, 1)) * mask).sum()
                    loss = total if reduction == "sum" else total / mask.sum()
                    accelerator.backward(loss, weight=mask.sum(), reduction=reduction)
            everything = [value for pair in counts for n in pair for value in range(1, n + 1)]
            expected = sum(everything) / len(everything) if everything else 0.0
            assert model.weight.grad.item() == pytest.approx(expected, rel=1e-5), (seed, counts)


def padded_tail() -> None:
    """Check even_batches=True: a batch of only repeats has weight 0, and the mask excludes repeats from a mixed batch."""
    x, y = make_data(12)
    check_epoch(DataLoader(TensorDataset(x, y), batch_size=4), [0, 12], x, y, 2, even=True)
    x, y = make_data(11)
    bare = make_net()
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(copy.deepcopy(bare), DataLoader(TensorDataset(x, y), batch_size=4))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            losses = (model(inputs) - targets).square()[loader.mask]
            accelerator.backward(losses.sum(), weight=len(losses), reduction="sum")
    assert_equal(copy_gradients(model), compute_gradients(bare, x, y))


def separate_windows_of_two_models() -> None:
    x, y = make_data(12)
    d, g = make_net(1), make_net(2)
    expected_d, expected_g = compute_gradients(d, x, y), compute_gradients(g, x[4:], y[4:])
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=3)
    d, g, loader = accelerator.prepare(d, g, DataLoader(TensorDataset(x, y), batch_size=2))
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(d):
            accelerator.backward(mse_loss(d(inputs), targets))
        if step:
            with accelerator.accumulate(g):
                accelerator.backward(mse_loss(g(inputs), targets))
    assert_equal(copy_gradients(d), expected_d)
    assert_equal(copy_gradients(g), expected_g)


def two_losses() -> None:
    """Check two losses from one forward pass and from two, in windows of one and of three micro-batches."""
    x, y = make_data(12)
    for is_one_forward in (True, False):
        for batch_size in (6, 2):
            bare = make_net()
            reference = copy.deepcopy(bare)
            (mse_loss(reference(x), y) + 0.5 * reference(x).square().mean()).backward()
            accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=3)
            model, loader = accelerator.prepare(bare, DataLoader(TensorDataset(x, y), batch_size=batch_size))
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    outputs = model(inputs)
                    accelerator.backward(mse_loss(outputs, targets), retain_graph=is_one_forward)
                    again = outputs if is_one_forward else model(inputs)
                    accelerator.backward(0.5 * again.square().mean())
            assert_equal(copy_gradients(model), copy_gradients(reference))


def evaluation_inside_training() -> None:
    """Check that an evaluation loop that breaks early, and a forward pass on rank 0 only, leave the gradients right."""
    x, y = make_data(20)
    bare = make_net()
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=8)
    model, loader, evaluation = accelerator.prepare(
        copy.deepcopy(bare),
        DataLoader(TensorDataset(x, y), batch_size=2),
        DataLoader(TensorDataset(x, y), batch_size=1),
    )
    for inputs, targets in loader:
        for held_out, _ in evaluation:
            with torch.no_grad():
                model(held_out)
            break
        if accelerator.is_main_process:
            with torch.no_grad():
                model(x.to(DEVICE))
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
    assert_equal(copy_gradients(model), compute_gradients(bare, x, y))


def windows_without_weight() -> None:
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(make_data(2)[0].to(DEVICE))[:0].mean(), weight=0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_updates == 0
    assert_equal([p.detach() for p in model.parameters()], before)


def skipped_with_continue() -> None:
    x, y = make_data(18)
    bare = make_net()
    kept = torch.cat([torch.arange(0, 6), torch.arange(12, 18)])
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(copy.deepcopy(bare), DataLoader(TensorDataset(x, y), batch_size=3))
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            if step == 1:
                continue
            accelerator.backward(mse_loss(model(inputs), targets))
    assert_equal(copy_gradients(model), compute_gradients(bare, x[kept], y[kept]))


def backward_outside_accumulate() -> None:
    """Check backward outside `accumulate`, with `no_sync` and a division by hand, and with weights that differ between ranks."""
    x, y = make_data(12)
    bare = make_net()
    accelerator = Accelerator(cpu=ON_CPU)
    model, loader = accelerator.prepare(copy.deepcopy(bare), DataLoader(TensorDataset(x, y), batch_size=2))
    for step, (inputs, targets) in enumerate(loader):
        if step < 2:
            with accelerator.no_sync(model):
                accelerator.backward(mse_loss(model(inputs), targets) / 3)
            assert len({float(v) for v in accelerator.gather(model[0].bias.grad.sum())}) == 2
        else:
            accelerator.backward(mse_loss(model(inputs), targets) / 3)
    assert_equal(copy_gradients(model), compute_gradients(bare, x, y))
    for reduction in ("mean", "sum"):
        model.zero_grad()
        piece = slice(0, 5) if accelerator.is_main_process else slice(5, 12)
        loss = mse_loss(model(x[piece].to(DEVICE)), y[piece].to(DEVICE), reduction=reduction)
        accelerator.backward(loss, weight=len(x[piece]), reduction=reduction)
        assert_equal(copy_gradients(model), compute_gradients(bare, x, y))


def clipping_by_hand() -> None:
    x, y = make_data(14)
    bare = make_net()
    expected = compute_gradients(bare, x, y)
    norm = torch.stack([g.norm() for g in expected]).norm()
    accelerator = Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=5, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model, loader = accelerator.prepare(copy.deepcopy(bare), DataLoader(TensorDataset(x, y), batch_size=3))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 3), norm, check_device=False)
    assert_equal(copy_gradients(model), [g / 3 for g in expected])


def overflow_on_one_rank() -> None:
    """Check that both ranks skip the update, the schedule does not advance, and the norm is the true one."""
    accelerator = Accelerator(
        cpu=ON_CPU, mixed_precision="fp16", gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )  # fmt: skip
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    weights, norms = [], []
    for number in range(6):
        with accelerator.accumulate(model):
            is_bad = number == 2 and not accelerator.is_main_process
            # One item with gradient 1 and three items with gradient 3: the mean is (1 + 3 * 3) / 4.
            count = 1 + 2 * accelerator.process_index
            loss = model(torch.full((1, 1), float(count), device=DEVICE)).float().mean() * (
                float("inf") if is_bad else 1.0
            )
            accelerator.backward(loss, weight=count)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            weights.append(model.weight.item())
    assert norms[::2] == [2.5, 2.5]
    assert weights == [1 - 0.625, 1 - 0.625, 1 - 0.625 - 0.0625 * 2.5]
    assert accelerator.num_updates == 2
    assert schedule.last_epoch == 4


def settings_and_means() -> None:
    x, y = make_data(32)
    accelerator = Accelerator(cpu=ON_CPU, global_batch_size=24)
    accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=4))
    assert accelerator.gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match=r"global_batch_size=4 is not a multiple .*\(8 samples\)"):
        Accelerator(cpu=ON_CPU, global_batch_size=4).prepare(DataLoader(TensorDataset(x, y), batch_size=4))
    split = Accelerator(cpu=ON_CPU, global_batch_size=24, split_batches=True)
    split.prepare(DataLoader(TensorDataset(x, y), batch_size=4))
    assert split.gradient_accumulation_steps == 6
    rank = accelerator.process_index
    assert float(accelerator.reduce_mean(torch.tensor([1.0, 10.0])[rank], [1, 9][rank])) == 11 / 10
    assert accelerator.reduce_mean(2**40 + rank, 1).item() == 2**40 + 0.5
    with pytest.raises(LossError, match="without a graph"):
        accelerator.backward(torch.tensor(1.0))


def constant_division() -> None:
    """Check `ConstantDivision`: each loss is divided by the number of steps and averaged over ranks, whatever its weight."""
    x, y = make_data(10)
    bare = make_net()
    pieces = [[slice(0, 4), slice(8, 10)], [slice(4, 8), slice(9, 10)]]
    reference = copy.deepcopy(bare)
    for piece in pieces[0] + pieces[1]:
        (mse_loss(reference(x[piece]), y[piece]) / 4).backward()
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2, loss_policy=ConstantDivision())
    model = accelerator.prepare(copy.deepcopy(bare))
    for piece in pieces[accelerator.process_index]:
        with accelerator.accumulate(model):
            loss = mse_loss(model(x[piece].to(DEVICE)), y[piece].to(DEVICE))
            accelerator.backward(loss, weight=len(x[piece]))
    assert_equal(copy_gradients(model), copy_gradients(reference))


SCENARIOS = [
    map_style, streams, ragged_batches, explicit_weights, padded_tail, separate_windows_of_two_models, two_losses,
    evaluation_inside_training, windows_without_weight, skipped_with_continue, backward_outside_accumulate,
    clipping_by_hand, overflow_on_one_rank, settings_and_means, constant_division,
]  # fmt: skip


def run_scenarios() -> dict[str, str]:
    """Run each scenario, and return the tracebacks of those that failed, by name."""
    found = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_scenarios, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[str, Any]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)
