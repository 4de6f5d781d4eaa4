"""Test batches of varying lengths: every update is traced, and fragmentation is counted."""

import pytest
import torch
from torch import nn

import headway
from benchmarks.forecast.truth import profile_peak
from headway.errors import ConfigError

LENGTHS = (40, 96, 64, 128, 16, 80)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50)

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)).relu())


def make_batch(size, length=128):
    tokens = torch.zeros(size, length, dtype=torch.long)
    return tokens, tokens


def compute_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def forecast_net(**given):
    given = {"device": "h100", "batch_size": 8, "largest": False} | given
    return headway.forecast(Net, make_batch, loss=compute_loss, **given)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_peak_on_a_cpu_is_that_of_the_loop(accumulation):
    model = Net()

    def train_net():
        optimizer = torch.optim.AdamW(model.parameters())
        for index, length in enumerate(LENGTHS, 1):
            inputs, targets = make_batch(8, length)
            outputs = model(inputs)
            each = compute_loss(outputs, targets)
            if accumulation > 1:
                each = each / accumulation
            each.backward()
            if index % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()

    taken = profile_peak(train_net, sum(each.nbytes for each in model.parameters()))
    found = forecast_net(device="cpu", lengths=LENGTHS, accumulation=accumulation)
    assert found.allocated == pytest.approx(taken, rel=0.01)
    assert found.peak.startswith(f"step {4 // accumulation} ")  # the fourth batch is the longest


def test_equal_lengths_give_the_forecast_without_lengths():
    found, plain = forecast_net(lengths=[128, 128]), forecast_net()
    assert (found.allocated, found.reserved, found.peak) == (plain.allocated, plain.reserved, plain.peak)


@pytest.mark.slow
def test_different_blocks_waste_memory_and_expandable_segments_save_it():
    # With increasing lengths, no freed block is large enough for the next one.
    wide = {"batch_size": 2048}
    rising = tuple(range(16, 129, 8))
    longest = forecast_net(**wide)
    found = forecast_net(lengths=rising, **wide)
    assert found.allocated == pytest.approx(longest.allocated, rel=0.1)
    assert found.reserved > 1.5 * longest.reserved
    assert forecast_net(lengths=rising, expandable_segments=True, **wide).reserved < 1.1 * longest.reserved


@pytest.mark.slow
def test_largest_batch_is_computed_for_the_lengths():
    found = forecast_net(lengths=LENGTHS, budget="3GiB", largest=True)
    at_most = {
        size: forecast_net(lengths=LENGTHS, batch_size=size).most
        for size in (found.largest_batch, found.largest_batch + 1)
    }
    assert at_most[found.largest_batch] <= 3 << 30 < at_most[found.largest_batch + 1]


def test_given_loop_gets_all_lengths():
    seen = []

    def loop(model, batches, optimizer):
        for inputs, targets in batches:
            seen.append(inputs.shape[1])
            compute_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    forecast_net(lengths=LENGTHS, loop=loop)
    assert seen == list(LENGTHS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lengths": [5]}, "those of 2 or more whole updates of 1"),
        ({"lengths": [5, 5, 5], "accumulation": 2}, "lengths: 3 of them"),
        ({"lengths": [5, 0]}, "the smallest 0"),
        ({"lengths": [5, 5], "longest": headway.LongestSequence(make_batch)}, "give one of them"),
    ],
)
def test_invalid_lengths_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        forecast_net(**given)


@pytest.mark.parametrize(("batch_fn", "given", "expected"), [
    (lambda size: make_batch(size), {"lengths": LENGTHS}, r"\(batch_size, length\), because lengths= is given"),
    (lambda size, length: make_batch(size, length), {}, r"\(batch_size\): missing a required argument: 'length'"),
])  # fmt: skip
def test_batch_fn_with_other_arguments_is_reported(batch_fn, given, expected):
    with pytest.raises(ConfigError, match=expected):
        headway.forecast(Net, batch_fn, loss=compute_loss, largest=False, **given)
