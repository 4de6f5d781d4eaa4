"""Test windows on one process: the gradient of an update equals that of the whole batch, however it was split."""

import copy
import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headway import Accelerator
from headway.core.config.run import GradientAccumulationPlugin
from headway.core.training.loss_policy import ConstantDivision
from headway.errors import ConfigError, LossError


def make_data(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 3, generator=generator), torch.randn(num_rows, 1, generator=generator)


def build_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def compute_whole_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of the mean over all rows, computed by plain PyTorch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    mse_loss(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


def copy_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Rows(IterableDataset):
    """Stream of rows without a length."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(zip(self.x, self.y))


class Groups(torch.utils.data.Sampler[list[int]]):
    """Batch sampler with batches of the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


def list_window_gradients(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> list[list[torch.Tensor]]:
    """Train one epoch with learning rate 0, and return the gradients after each window's last backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            if accelerator.sync_gradients:
                found.append(copy_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize(("batch_size", "steps"), [(2, 4), (8, 1), (3, 2), (3, 5), (5, 2), (1, 8)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_gradients_equal_those_of_the_whole_window(batch_size: int, steps: int, is_stream: bool) -> None:
    x, y = make_data(19)
    model = build_net()
    dataset = Rows(x, y) if is_stream else TensorDataset(x, y)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    found = list_window_gradients(accelerator, model, DataLoader(dataset, batch_size=batch_size))
    size = batch_size * steps
    pieces = [slice(start, start + size) for start in range(0, 19, size)]
    assert len(found) == len(pieces)
    for piece, gradient in zip(pieces, found):
        assert_close(gradient, compute_whole_gradient(model, x[piece], y[piece]))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9), steps=st.integers(1, 5), seed=st.integers(0, 9))
def test_any_ragged_split_gives_the_whole_gradient(sizes: list[int], steps: int, seed: int) -> None:
    x, y = make_data(sum(sizes), seed)
    model = build_net(seed)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    found = list_window_gradients(accelerator, model, DataLoader(TensorDataset(x, y), batch_sampler=Groups(sizes)))
    edges = [sum(sizes[:n]) for n in [*range(0, len(sizes), steps), len(sizes)]]
    assert len(found) == len(edges) - 1
    for start, stop, gradient in zip(edges, edges[1:], found):
        assert_close(gradient, compute_whole_gradient(model, x[start:stop], y[start:stop]))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 7), min_size=3, max_size=9), reduction=st.sampled_from(["mean", "sum"]),
    scale=st.sampled_from([1, 1000]),
)  # fmt: skip
def test_any_weights_give_the_mean_over_all_items(counts: list[int], reduction: str, scale: int) -> None:
    """Weights are tokens per micro-batch and can be 0. A mean over no tokens is NaN and has weight 0."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    values = [torch.arange(1.0, n * scale + 1).reshape(-1, 1) for n in counts]
    for start in range(0, len(counts) - len(counts) % 3, 3):
        model.zero_grad()
        for items in values[start : start + 3]:
            with accelerator.accumulate(model):
                total = model(items).sum()
                loss = total if reduction == "sum" else total / torch.tensor(len(items))
                accelerator.backward(loss, weight=len(items), reduction=reduction)
        window = torch.cat(values[start : start + 3])
        if len(window):
            torch.testing.assert_close(model.weight.grad.item(), window.mean().item(), rtol=1e-5, atol=0)


def test_two_sets_of_models_have_separate_windows() -> None:
    """accumulate(d) and accumulate(g) count and close their windows independently."""
    x, y = make_data(12)
    d, g = build_net(1), build_net(2)
    reference_d, reference_g = compute_whole_gradient(d, x, y), compute_whole_gradient(g, x[4:], y[4:])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    d, g, loader = accelerator.prepare(d, g, DataLoader(TensorDataset(x, y), batch_size=4))
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(d):
            accelerator.backward(mse_loss(d(inputs), targets))
            assert accelerator.sync_gradients == (step == 2)
        if step:
            with accelerator.accumulate(g):
                accelerator.backward(mse_loss(g(inputs), targets))
                assert accelerator.sync_gradients == (step == 2)
    assert_close(copy_gradients(d), reference_d)
    assert_close(copy_gradients(g), reference_g)


def test_two_losses_of_a_micro_batch_are_added() -> None:
    x, y = make_data(10)
    model = build_net()
    reference = copy.deepcopy(model)
    (mse_loss(reference(x), y) + 0.5 * reference(x).square().mean()).backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=4))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            accelerator.backward(mse_loss(outputs, targets), retain_graph=True)
            accelerator.backward(0.5 * outputs.square().mean())
    assert_close(copy_gradients(model), [p.grad for p in reference.parameters()])


def test_two_losses_of_a_micro_batch_cannot_have_different_weights() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build_net())
    with accelerator.accumulate(model):
        accelerator.backward(model(make_data(2)[0]).mean(), weight=2)
        with pytest.raises(LossError, match="weigh 2 and 3"):
            accelerator.backward(model(make_data(2)[0]).mean(), weight=3)


def test_interrupted_evaluation_loop_does_not_change_the_window() -> None:
    x, y = make_data(10)
    model = build_net()
    reference = compute_whole_gradient(model, x, y)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader, evaluation = accelerator.prepare(
        model, DataLoader(TensorDataset(x, y), batch_size=3), DataLoader(TensorDataset(x, y), batch_size=1)
    )
    for inputs, targets in loader:
        with torch.no_grad():
            for held_out, _ in evaluation:
                model(held_out)
                break
        with accelerator.accumulate(model):
            for held_out, _ in evaluation:
                model(held_out)
                break
            accelerator.backward(mse_loss(model(inputs), targets))
    assert accelerator.sync_gradients
    assert_close(copy_gradients(model), reference)


def test_micro_batch_left_by_continue_has_no_weight() -> None:
    x, y = make_data(12)
    model = build_net()
    kept = torch.cat([torch.arange(0, 3), torch.arange(6, 12)])
    reference = compute_whole_gradient(model, x[kept], y[kept])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=3))
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            if step == 1:
                continue
            accelerator.backward(mse_loss(model(inputs), targets))
    assert_close(copy_gradients(model), reference)


def test_window_continues_if_its_last_micro_batch_had_no_backward() -> None:
    """step and zero_grad do nothing before a backward, even if the loop calls them."""
    x, y = make_data(9)
    model = build_net()
    kept = torch.cat([torch.arange(0, 3), torch.arange(6, 9)])
    reference = compute_whole_gradient(model, x[kept], y[kept])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        piece = slice(3 * step, 3 * step + 3)
        with accelerator.accumulate(model):
            loss = mse_loss(model(x[piece]), y[piece])
            if step != 1:
                accelerator.backward(loss, weight=3)
            optimizer.step()
            if step < 2:
                optimizer.zero_grad()
                assert accelerator.num_updates == 0
    assert accelerator.num_updates == 1
    assert_close(copy_gradients(model), reference)


@pytest.mark.parametrize("steps", [1, 3])
def test_zero_grad_can_come_before_backward(steps: int) -> None:
    x, y = make_data(12)
    model = build_net()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=2))
    seen = 0
    for number, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
        if accelerator.sync_gradients:
            stop = 2 * (number + 1)
            assert_close(
                copy_gradients(model),
                compute_whole_gradient(model, x[stop - 2 * steps : stop], y[stop - 2 * steps : stop]),
            )
            seen += 1
    assert seen == accelerator.num_updates == 6 // steps


def test_micro_batch_with_an_error_restarts_the_window() -> None:
    x, y = make_data(6)
    model = build_net()
    reference = compute_whole_gradient(model, x, y)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        piece = slice(3 * (step % 2), 3 * (step % 2) + 3)
        with suppress(RuntimeError), accelerator.accumulate(model):
            if step == 1:
                raise RuntimeError("out of luck")
            accelerator.backward(mse_loss(model(x[piece]), y[piece]), weight=3)
        if step == 1:
            optimizer.step()
            assert accelerator.num_updates == 0
    assert accelerator.sync_gradients
    assert_close(copy_gradients(model), reference)


def test_window_of_weight_0_makes_no_update() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(2):
        with accelerator.accumulate(model):
            # A masked mean over no items is 0/0, with a gradient of 0 * inf.
            accelerator.backward((model(make_data(2)[0]) * 0).sum() / torch.tensor(0.0), weight=0)
            assert not any(p.grad.isnan().any() for p in model.parameters())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_updates == 0
    assert schedule.get_last_lr() == [1.0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def list_warnings_of_weight(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "total loss weight of 0" in text]


def run_windows(accelerator: Accelerator, weights: list[int]) -> torch.optim.Optimizer:
    """Run one window, of one micro-batch, for each weight. A loss of weight 0 is NaN."""
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for weight in weights:
        with accelerator.accumulate(model):
            loss = model(make_data(2)[0])
            accelerator.backward(loss.mean() if weight else loss[:0].mean(), weight=weight)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def test_one_warning_if_the_first_windows_have_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    run_windows(accelerator, [0, 0, 0, 0])
    assert accelerator.num_updates == 0
    assert accelerator.clock.num_without_weight == 4
    (text,) = list_warnings_of_weight(caplog)
    assert text.startswith(
        "the last 2 accumulation windows had a total loss weight of 0 on all ranks, so they made no update"
    )


def test_no_warning_if_some_windows_have_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    run_windows(accelerator, [0, 2, *[0] * 19, 2, *[0] * 19])
    assert accelerator.num_updates == 2
    assert not list_warnings_of_weight(caplog)


def test_warning_if_many_windows_in_a_row_have_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    run_windows(Accelerator(cpu=True), [2, *[0] * 20])
    (text,) = list_warnings_of_weight(caplog)
    assert text.startswith("the last 20 accumulation windows")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_last_loss_of_weight_0_outside_accumulate_keeps_the_update(
    num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    x, y = make_data(4)
    bare = build_net()
    copied = copy.deepcopy(bare)
    model, optimizer = accelerator.prepare(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(mse_loss(model(x), y), weight=4)
        accelerator.backward(mse_loss(model(x[:0]), y[:0]), weight=0)
        optimizer.step()
        optimizer.zero_grad()
        plain = torch.optim.SGD(bare.parameters(), lr=0.1)
        plain.zero_grad()
        (mse_loss(bare(x), y) / num_steps).backward()
        plain.step()
    assert accelerator.num_updates == 3
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in bare.parameters()])
    assert not list_warnings_of_weight(caplog)


def test_windows_without_weight_outside_accumulate(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1.0))
    before = copy.deepcopy(model.state_dict())
    for num_warnings in (0, 1):  # the losses of one update count once
        for _ in range(2):
            accelerator.backward(model(make_data(2)[0])[:0].mean(), weight=0)
        optimizer.step()
        optimizer.zero_grad()
        assert len(list_warnings_of_weight(caplog)) == num_warnings
    assert accelerator.num_updates == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_sync_keeps_the_scripts_own_division_of_the_loss() -> None:
    x, y = make_data(9)
    model = build_net()
    reference = compute_whole_gradient(model, x, y)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=3))
    for number, (inputs, targets) in enumerate(loader):
        context = accelerator.no_sync(model) if number < 2 else suppress()
        with context:
            accelerator.backward(mse_loss(model(inputs), targets) / 3)
    assert_close(copy_gradients(model), reference)
    optimizer.step()
    optimizer.zero_grad()
    assert accelerator.num_updates == 1
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weighted_backward_outside_accumulate_gives_the_gradient_of_the_mean(reduction: str) -> None:
    """Each backward is a separate window, whose gradient is that of the mean."""
    x, y = make_data(5)
    model = build_net()
    reference = compute_whole_gradient(model, x, y)
    model = (accelerator := Accelerator(cpu=True)).prepare(model)
    accelerator.backward(mse_loss(model(x), y, reduction=reduction), weight=5, reduction=reduction)
    assert_close(copy_gradients(model), reference)


def test_parameters_unfrozen_after_prepare_are_corrected() -> None:
    x, y = make_data(7)
    model = build_net()
    reference = compute_whole_gradient(model, x, y)
    model[0].requires_grad_(False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=4))
    model[0].requires_grad_(True)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
    assert_close(copy_gradients(model), reference)


def test_clipping_and_norm_use_final_gradients() -> None:
    x, y = make_data(7)
    model = build_net()
    reference = torch.stack([g.norm() for g in compute_whole_gradient(model, x, y)]).norm()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=2))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            norm = accelerator.clip_grad_norm_(model.parameters(), reference / 2)
    torch.testing.assert_close(norm, reference)
    torch.testing.assert_close(torch.stack([g.norm() for g in copy_gradients(model)]).norm(), reference / 2)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert max(g.abs().max() for g in copy_gradients(model)) <= 1e-4


def test_constant_division_divides_each_loss_by_the_number_of_steps() -> None:
    """ConstantDivision divides each loss by the number of steps, regardless of the window's content."""
    x, y = make_data(7)
    model = build_net()
    reference = copy.deepcopy(model)
    for piece in (slice(0, 4), slice(4, 7)):
        (mse_loss(reference(x[piece]), y[piece]) / 3).backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, loss_policy=ConstantDivision())
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=4))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
    assert_close(copy_gradients(model), [p.grad for p in reference.parameters()])


def test_windows_can_span_epochs() -> None:
    x, y = make_data(6)
    model = build_net()
    reference = compute_whole_gradient(model, torch.cat([x, x[:2]]), torch.cat([y, y[:2]]))
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=2))
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
            if epoch:
                break
        assert accelerator.sync_gradients == (epoch == 1)
    assert_close(copy_gradients(model), reference)


def test_number_of_steps_can_change_between_windows() -> None:
    x, y = make_data(12)
    model = build_net()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(model)
    start = 0
    for steps in (2, 3, 1):
        accelerator.gradient_accumulation_steps = steps
        first, model_grads = start, None
        model.zero_grad()
        for _ in range(steps):
            piece = slice(start, start + 2)
            start += 2
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x[piece]), y[piece]), weight=2)
        model_grads = copy_gradients(model)
        assert_close(model_grads, compute_whole_gradient(model, x[first:start], y[first:start]))
    with pytest.raises(ConfigError, match="0 steps"):
        accelerator.gradient_accumulation_steps = 0


@pytest.mark.parametrize(
    ("make", "weight", "reduction", "message"),
    [
        (lambda model: 1.0, None, "mean", "got a float"),
        (lambda model: model(torch.ones(2, 3)), None, "mean", r"shape \(2, 1\)"),
        (lambda model: model(torch.ones(2, 3)).mean().detach(), None, "mean", "without a graph"),
        (lambda model: model(torch.ones(2, 3)).mean(), -1, "mean", "weight=-1"),
        (lambda model: model(torch.ones(2, 3)).mean(), float("nan"), "mean", "weight=nan"),
        (lambda model: model(torch.ones(2, 3)).mean(), 1, "max", "reduction='max'"),
    ],
)
def test_invalid_loss_is_refused(make, weight, reduction, message) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(build_net())
    with pytest.raises(LossError, match=message):
        accelerator.backward(make(model), weight=weight, reduction=reduction)


def test_global_batch_size_sets_the_accumulation_steps(caplog: pytest.LogCaptureFixture) -> None:
    x, y = make_data(32)
    accelerator = Accelerator(cpu=True, global_batch_size=16)
    with caplog.at_level("INFO"):
        accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=4))
    assert accelerator.gradient_accumulation_steps == 4
    assert "global batch 16 = 4 per process x 1 processes x 4 accumulation steps" in caplog.text


def test_global_batch_size_that_does_not_fit_is_refused() -> None:
    x, y = make_data(32)
    with pytest.raises(ConfigError, match=r"global_batch_size=18 is not a multiple .*\(4 samples\)"):
        Accelerator(cpu=True, global_batch_size=18).prepare(DataLoader(TensorDataset(x, y), batch_size=4))
    with pytest.raises(ConfigError, match="do not give the steps as well"):
        Accelerator(cpu=True, global_batch_size=16, gradient_accumulation_steps=2)


def test_reduce_mean_divides_by_the_weight() -> None:
    accelerator = Accelerator(cpu=True)
    assert float(accelerator.reduce_mean(torch.tensor(6.0), 4)) == 1.5


@pytest.mark.parametrize("num_read", [1, 2])
def test_reading_batches_ahead_is_noticed_in_the_first_window(num_read: int, caplog: pytest.LogCaptureFixture) -> None:
    """With batches read ahead, the epoch would end, and close a window, at the first of them."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_net()
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(*make_data(16)), batch_size=2))
    batches = iter(loader)
    for x, y in islice(batches, 2) if num_read == 1 else list(islice(batches, 2)):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
    assert ("2 batches were read before the first of them was used in accumulate()" in caplog.text) == (num_read == 2)


def test_skipped_batch_does_not_count_as_reading_ahead(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_net()
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(*make_data(16)), batch_size=2))
    for number, (x, y) in enumerate(loader):
        if number % 3 == 1:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
    assert "were read before" not in caplog.text


# ---------------------------------------------------------------- abandoned windows


def train_clipped(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 3), value)).float().square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if value > 10.0:
            raise FloatingPointError
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("loads", [False, True])
def test_gradients_of_an_abandoned_window_do_not_count_in_the_next_one(
    precision: str, loads: bool, tmp_path: Path
) -> None:
    found = []
    for is_abandoned in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = build_net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train_clipped(accelerator, model, optimizer, 1.0)
        accelerator.save_state(tmp_path / "saved")
        if is_abandoned and loads:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 3), 1e4)).float().square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.load_state(tmp_path / "saved")
        elif is_abandoned:
            with suppress(FloatingPointError):
                train_clipped(accelerator, model, optimizer, 20.0)
        train_clipped(accelerator, model, optimizer, 2.0)
        found.append([*map(torch.clone, model.parameters()), torch.tensor(accelerator.num_updates)])
        accelerator.end_training()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("num_batches", [1, 2])
def test_load_drops_a_batch_that_could_be_run_again(num_batches: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto", gradient_accumulation_steps=2)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(num_batches: int = 2) -> None:
        for _ in range(num_batches):
            accelerator.forward_backward(torch.ones(4, 3), lambda x: model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    train()
    accelerator.save_state(tmp_path / "saved")
    train()
    expected = [p.clone() for p in model.parameters()]
    accelerator.load_state(tmp_path / "saved")
    for _ in range(num_batches):
        accelerator.forward_backward(torch.full((4, 3), 9.0), lambda x: model(x).square().mean())
    accelerator.load_state(tmp_path / "saved")
    assert all(p.grad is None for p in model.parameters())
    train()
    assert all(map(torch.equal, expected, model.parameters()))
