"""Tests of a loss that depends on no model on one rank, as for batches without targets (huggingface/trl#5826, RT-DETR#684)."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from tests.distributed.ranks import RankFailed, run_ranks

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)
BATCH = 4


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def train_with_an_empty_batch(make_zero_loss, calls_model=True, **options):
    """Train for one epoch in which the last rank's second batch has no targets. Return the weights."""
    accelerator = Accelerator(cpu=True, **options)
    model, rank = build_model(), accelerator.process_index
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch_size = BATCH // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=batch_size)
    )
    for index, batch in enumerate(loader):
        for inputs, targets in accelerator.microbatches(batch):
            with accelerator.accumulate(model):
                is_empty = index == 1 and rank == accelerator.num_processes - 1
                output = model(inputs) if calls_model or not is_empty else inputs
                accelerator.backward(make_zero_loss(output) if is_empty else mse_loss(output, targets))
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()] or [torch.zeros(0)])


def train_by_hand(world_size):
    """Train for the same epoch in one process. A rank's loss of zero counts as a mean of zeros over its rows."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(len(INPUTS) // BATCH):
        rows = slice(index * BATCH, index * BATCH + BATCH)
        num_rows = BATCH - BATCH // world_size if index == 1 else BATCH
        loss = mse_loss(model(INPUTS[rows])[:num_rows], TARGETS[rows][:num_rows], reduction="sum") / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def make_constant(output):
    return torch.zeros((), requires_grad=True)


def multiply_by_zero(output):
    return (output * 0).sum()


@pytest.mark.parametrize(
    ("strategy", "calls_model"), [("ddp", True), ("ddp", False), ("fsdp", True)], ids=["ddp", "ddp, not called", "fsdp"]
)
def test_constant_loss_on_one_rank_raises_instead_of_hanging(strategy, calls_model):
    with pytest.raises(RankFailed, match="requires_grad=True, which no model computed"):
        run_ranks(_train_with_constant_loss, 2, strategy, calls_model, timeout=60)


def _train_with_constant_loss(strategy, calls_model):
    return train_with_an_empty_batch(make_constant, calls_model, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_zero_loss_that_depends_on_the_output_is_exact(strategy):
    torch.testing.assert_close(run_ranks(_train_with_zero_loss, 2, strategy)[0], train_by_hand(2))


def _train_with_zero_loss(strategy):
    return train_with_an_empty_batch(multiply_by_zero, strategy=strategy)


def test_constant_loss_on_one_process_matches_plain_pytorch():
    torch.testing.assert_close(run_ranks(_train_on_one_process, 1)[0], train_by_hand(1))


def _train_on_one_process():
    return train_with_an_empty_batch(make_constant)


def test_constant_loss_works_with_gradients_synchronized_once_per_window():
    torch.testing.assert_close(run_ranks(_train_with_microbatching, 2)[0], train_by_hand(2))


def _train_with_microbatching():
    return train_with_an_empty_batch(make_constant, microbatching="auto")


def test_constant_loss_inside_a_window_matches_plain_pytorch():
    """Gradients are synchronized only in a window's last micro-batch, so no rank waits for the constant loss."""
    weights = run_ranks(_train_windows, 2)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = list(range(len(INPUTS)))
    for window in (rows[:8], rows[8:]):
        has_targets = [row not in (2, 3) for row in window]
        losses = mse_loss(model(INPUTS[window]), TARGETS[window], reduction="none").flatten()
        (losses * torch.tensor(has_targets)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights[0], torch.cat([value.flatten() for value in model.state_dict().values()]))


def _train_windows():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2)
    )
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            output = model(inputs)
            is_empty = index == 0 and accelerator.process_index == 1
            accelerator.backward(make_constant(output) if is_empty else mse_loss(output, targets))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
