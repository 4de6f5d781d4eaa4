"""Batches of varying lengths: every update is traced, and fragmentation is counted."""

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


def batch(size, length=128):
    tokens = torch.zeros(size, length, dtype=torch.long)
    return tokens, tokens


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def forecast(**given):
    given = {"device": "h100", "batch_size": 8, "largest": False} | given
    return headway.forecast(Net, batch, loss=loss, **given)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_peak_on_a_cpu_is_that_of_the_loop_by_hand(accumulation):
    model = Net()

    def work():
        optimizer = torch.optim.AdamW(model.parameters())
        for index, length in enumerate(LENGTHS, 1):
            inputs, targets = batch(8, length)
            outputs = model(inputs)
            each = loss(outputs, targets)
            if accumulation > 1:
                each = each / accumulation
            each.backward()
            if index % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()

    taken = profile_peak(work, sum(each.nbytes for each in model.parameters()))
    found = forecast(device="cpu", lengths=LENGTHS, accumulation=accumulation)
    assert found.allocated == pytest.approx(taken, rel=0.01)
    assert found.peak.startswith(f"step {4 // accumulation} ")  # the longest is the fourth


def test_lengths_that_do_not_vary_are_what_is_forecast_without_them():
    found, plain = forecast(lengths=[128, 128]), forecast()
    assert (found.allocated, found.reserved, found.peak) == (plain.allocated, plain.reserved, plain.peak)


@pytest.mark.slow
def test_unlike_blocks_cost_the_allocator_memory_and_expandable_segments_save_it():
    # Rising lengths: no block that was given back is large enough for the next.
    wide = {"batch_size": 2048}
    rising = tuple(range(16, 129, 8))
    longest = forecast(**wide)
    found = forecast(lengths=rising, **wide)
    assert found.allocated == pytest.approx(longest.allocated, rel=0.1)
    assert found.reserved > 1.5 * longest.reserved
    assert forecast(lengths=rising, expandable_segments=True, **wide).reserved < 1.1 * longest.reserved


@pytest.mark.slow
def test_the_largest_batch_is_for_these_lengths():
    found = forecast(lengths=LENGTHS, budget="3GiB", largest=True)
    at_most = {
        size: forecast(lengths=LENGTHS, batch_size=size).most for size in (found.largest_batch, found.largest_batch + 1)
    }
    assert at_most[found.largest_batch] <= 3 << 30 < at_most[found.largest_batch + 1]


def test_a_loop_of_ones_own_gets_all_of_them():
    seen = []

    def loop(model, batches, optimizer):
        for inputs, targets in batches:
            seen.append(inputs.shape[1])
            loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    forecast(lengths=LENGTHS, loop=loop)
    assert seen == list(LENGTHS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lengths": [5]}, "those of 2 or more whole updates of 1"),
        ({"lengths": [5, 5, 5], "accumulation": 2}, "lengths: 3 of them"),
        ({"lengths": [5, 0]}, "the smallest 0"),
        ({"lengths": [5, 5], "longest": headway.LongestSequence(batch)}, "give one of them"),
    ],
)
def test_what_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
        forecast(**given)


@pytest.mark.parametrize(("batch_fn", "given", "wanted"), [
    (lambda size: batch(size), {"lengths": LENGTHS}, r"\(batch_size, length\), because lengths= is given"),
    (lambda size, length: batch(size, length), {}, r"\(batch_size\): missing a required argument: 'length'"),
])  # fmt: skip
def test_a_batch_fn_with_other_arguments_is_reported(batch_fn, given, wanted):
    with pytest.raises(ConfigError, match=wanted):
        headway.forecast(Net, batch_fn, loss=loss, largest=False, **given)
