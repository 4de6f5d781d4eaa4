"""Training loops from the documentation of other libraries, with only the import changed, match the plain loop on one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.ranks import run_ranks

BATCH = 4


def make_parts(batch_size):
    """Return model, optimizer, loader and schedule of a script. 1 and 2 processes divide its 32 samples evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.randn(32, 3)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    return model, optimizer, DataLoader(dataset, batch_size=batch_size), scheduler


def flatten_weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_by_hand(num_processes, gradient_accumulation_steps=1):
    """Train without Headway, on the samples that all processes read together and with as many schedule ticks."""
    model, optimizer, training_dataloader, scheduler = make_parts(BATCH * num_processes)
    for index, (inputs, targets) in enumerate(training_dataloader):
        loss = nn.functional.mse_loss(model(inputs), targets) / gradient_accumulation_steps
        loss.backward()
        if (index + 1) % gradient_accumulation_steps == 0:
            optimizer.step()
            for _ in range(num_processes):
                scheduler.step()
            optimizer.zero_grad()
    return flatten_weights(model), scheduler.get_last_lr()


def quicktour():
    loss_function = nn.functional.mse_loss
    model, optimizer, training_dataloader, scheduler = make_parts(BATCH)
    # fmt: off
    from headway import Accelerator
    accelerator = Accelerator()

    device = accelerator.device
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    # fmt: on
    assert inputs.device == device
    return flatten_weights(model), scheduler.get_last_lr()


def accumulate_by_hand():
    gradient_accumulation_steps = 2
    loss_function = nn.functional.mse_loss
    model, optimizer, training_dataloader, scheduler = make_parts(BATCH)
    # fmt: off
    from headway import Accelerator
    accelerator = Accelerator()

    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for index, batch in enumerate(training_dataloader):
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        loss = loss / gradient_accumulation_steps
        accelerator.backward(loss)
        if (index+1) % gradient_accumulation_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # fmt: on
    return flatten_weights(model), scheduler.get_last_lr()


def accumulate():
    loss_function = nn.functional.mse_loss
    model, optimizer, training_dataloader, scheduler = make_parts(BATCH)
    # fmt: off
    from headway import Accelerator
    accelerator = Accelerator(gradient_accumulation_steps=2)

    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for batch in training_dataloader:
        with accelerator.accumulate(model):
            inputs, targets = batch
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # fmt: on
    return flatten_weights(model), scheduler.get_last_lr()


class Metric:
    """Metric with the interface of the packages that the documentation uses."""

    def __init__(self):
        self.rows = []

    def add_batch(self, predictions, targets):
        self.rows += zip(predictions.tolist(), targets.tolist())


def evaluate():
    """Evaluate on 27 samples, which neither the batch size nor two processes divide."""
    metric = Metric()
    model, optimizer, training_dataloader, _ = make_parts(BATCH)
    inputs, targets = training_dataloader.dataset[:27]
    validation_dataloader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    # fmt: off
    from headway import Accelerator
    accelerator = Accelerator()
    model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    validation_dataloader = accelerator.prepare(validation_dataloader)

    for inputs, targets in validation_dataloader:
        predictions = model(inputs)
        # Gather all predictions and targets
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        # Example of use with a *Datasets.Metric*
        metric.add_batch(all_predictions, all_targets)
    # fmt: on
    return metric.rows


def run_all():
    from headway.core.runtime import process

    out = {}
    for script in (quicktour, accumulate_by_hand, accumulate, evaluate):
        out[script.__name__] = script()
        process.reset() if process.current().world_size == 1 else None
    return out


@pytest.mark.parametrize("num_processes", [1, 2])
def test_documented_loops_match_the_plain_loop(num_processes):
    ranks = run_ranks(run_all, num_processes)
    once, twice = train_by_hand(num_processes), train_by_hand(num_processes, gradient_accumulation_steps=2)
    model, _, loader, _ = make_parts(BATCH)
    inputs, targets = loader.dataset[:27]
    expected = torch.cat([model(inputs), targets], 1)
    for out in ranks:
        for name, (values, rates) in {"quicktour": once, "accumulate_by_hand": twice, "accumulate": twice}.items():
            assert torch.allclose(out[name][0], values, atol=1e-6), name
            assert out[name][1] == pytest.approx(rates), name
        rows = torch.tensor(out["evaluate"]).squeeze(-1)
        assert rows.shape == (27, 2)
        assert torch.allclose(rows, expected, atol=1e-6)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_plain_loops_differ_by_accumulation(num_processes):
    first, second = train_by_hand(num_processes)[0], train_by_hand(num_processes, gradient_accumulation_steps=2)[0]
    assert not torch.allclose(first, second, atol=1e-3)
