"""Totals of samples and tokens that a run has trained on: counted once, exact at any save, continued by a resumed run."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, NonFinitePolicy, ProjectConfiguration
from headway.cli.checkpoints import format_summary
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import ConfigError

LENGTHS = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])
"""Number of tokens of each row. The other tokens of the 8 of a row are padding."""


class OutOfMemoryOnce(torch.nn.Linear):
    """Linear layer whose second training batch runs out of memory while it has two rows or more."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls >= 2 and len(x) > 1 and self.num_calls < 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def build(folder, num_steps=1, model=None, **options):
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=num_steps,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True), **options,
    )  # fmt: skip
    model = torch.nn.Linear(1, 1) if model is None else model
    loader = DataLoader(LENGTHS, batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def train(accelerator, model, optimizer, loader, num_epochs, stop_after=None):
    """Train, and save after batch `stop_after` of this call, which ends it. Return the totals after each batch."""
    meter, found = accelerator.throughput, []
    for _ in accelerator.epochs(num_epochs):
        for lengths in loader:
            meter.add(tokens=lengths.sum(), padding=8 * len(lengths) - lengths.sum())
            with accelerator.accumulate(model):
                accelerator.backward(model(lengths[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
            found.append(meter.seen())
            if len(found) == stop_after:
                accelerator.save_state()
                return found
    return found


def test_totals_are_those_of_the_data(tmp_path):
    accelerator, *objects = build(tmp_path)
    found = train(accelerator, *objects, num_epochs=2)
    assert found[0]["samples_seen"] == 2
    assert found[0]["tokens_seen"] + found[0]["padding_tokens_seen"] == 16
    # 10 rows of 8 tokens per epoch; the lengths sum up to 35
    assert found[-1] == {"num_updates": 10, "samples_seen": 20, "tokens_seen": 70, "padding_tokens_seen": 90}


@pytest.mark.parametrize(("num_steps", "stop_after"), [(1, 3), (2, 3), (2, 4), (2, 6)])
def test_resumed_run_continues_the_totals_also_from_within_a_window(num_steps, stop_after, tmp_path):
    whole = train(*build(tmp_path / "whole", num_steps), num_epochs=2)
    train(*build(tmp_path / "cut", num_steps), num_epochs=2, stop_after=stop_after)
    accelerator, *objects = build(tmp_path / "cut", num_steps)
    assert accelerator.resume("latest") is not None
    before = accelerator.throughput.seen()
    rest = train(accelerator, *objects, num_epochs=2)
    start = len(whole) - len(rest)
    assert start in (stop_after, stop_after - 1)  # a window that was cut in two begins again
    assert before == whole[start - 1]
    assert rest == whole[start:]


def test_manifest_and_inspect_contain_the_totals(tmp_path):
    train(*build(tmp_path), num_epochs=1, stop_after=5)
    manifest = read_manifest(tmp_path / "checkpoints" / "checkpoint_0")
    totals = {name: value for name, value in manifest.about.items() if name.endswith("_seen")}
    assert totals == {"samples_seen": 10, "tokens_seen": 35, "padding_tokens_seen": 45}
    assert "tokens seen: 35" in format_summary(manifest)


def test_replayed_batch_counts_once(tmp_path):
    model = OutOfMemoryOnce(1, 1)
    accelerator, model, optimizer, loader = build(tmp_path, model=model, microbatching="auto")
    for lengths in loader:
        for piece in accelerator.microbatches(lengths):
            with accelerator.accumulate(model):
                accelerator.throughput.add(tokens=piece.sum())
                accelerator.backward(model(piece[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.throughput.seen() == {"num_updates": 5, "samples_seen": 10, "tokens_seen": 35}


def test_batches_without_training_do_not_count(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path)
    evaluation = accelerator.prepare(DataLoader(LENGTHS, batch_size=2))
    for lengths in loader:
        for _ in evaluation:
            pass
        accelerator.backward(model(lengths[:, None].float()).mean())
        optimizer.step()
        optimizer.zero_grad()
    for _ in loader:
        pass
    assert accelerator.throughput.seen() == {"num_updates": 5, "samples_seen": 10}


def test_large_counts_are_exact(tmp_path):
    """A float32 sum, such as 0.0 + an integer tensor, stops at 2**24 if it grows by 1."""
    accelerator, *_ = build(tmp_path)
    accelerator.throughput.add(tokens=torch.tensor(2**40))
    for _ in range(3):
        accelerator.throughput.add(tokens=torch.tensor(1))
    assert accelerator.throughput.seen()["tokens_seen"] == 2**40 + 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": -1}, "tokens=-1; give a number of tokens, 0 or more"),
        ({"tokens": 1, "padding": float("nan")}, "padding=nan; give"),
        ({"tokens": torch.ones(2, 3)}, r"tokens has shape \[2, 3\]; give the number of tokens, such as mask.sum\(\)"),
    ],
)
def test_counts_that_are_no_numbers_are_errors(given, message, tmp_path):
    accelerator, *_ = build(tmp_path)
    with pytest.raises(ConfigError, match=message):
        accelerator.throughput.add(**given)


def test_window_that_is_run_again_to_find_a_nan_counts_once(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path, on_non_finite=NonFinitePolicy("skip", explains=True))
    num_batches = 0
    for lengths in loader:
        num_batches += 1
        accelerator.throughput.add(tokens=lengths.sum())
        with accelerator.accumulate(model):
            loss = model(lengths[:, None].float()).mean()
            accelerator.backward(torch.log(loss * 0 - 1) if num_batches in (2, 3) else loss)
            optimizer.step()
            optimizer.zero_grad()
    assert num_batches == 6  # the second batch is repeated
    assert accelerator.throughput.seen() == {"num_updates": 4, "samples_seen": 10, "tokens_seen": 35}


# ---------------------------------------------------------------- batches read ahead, and batches left out


def step(accelerator, model, optimizer, lengths):
    with accelerator.accumulate(model):
        accelerator.backward(model(lengths[:, None].float()).mean())
        optimizer.step()
        optimizer.zero_grad()


def train_in_windows(accelerator, model, optimizer, loader, num_epochs, stop_after=None, size=4):
    """Read `size` batches, then train on them. Return the samples seen after each batch; save after `stop_after`."""
    found = []
    for _ in accelerator.epochs(num_epochs):
        batches = iter(loader)
        while window := list(islice(batches, size)):
            for lengths in window:
                step(accelerator, model, optimizer, lengths)
                found.append(accelerator.throughput.seen()["samples_seen"])
                if len(found) == stop_after:
                    accelerator.save_state()
                    return found
    return found


def test_batches_collected_at_the_end_of_a_loader_count(tmp_path):
    """Of 5 batches of 2 samples, the loader ends while the script has not trained on the fifth yet."""
    found = train_in_windows(*build(tmp_path, num_steps=4), num_epochs=2)
    assert found == [8, 8, 8, 8, 10, 18, 18, 18, 18, 20]


@pytest.mark.parametrize(("num_steps", "stop_after"), [(4, 4), (4, 5), (2, 4), (2, 5), (2, 7)])
def test_resumed_run_counts_collected_batches_once(num_steps, stop_after, tmp_path):
    """A save may fall after a window, or into the one that the end of the loader has made shorter."""
    whole = train_in_windows(*build(tmp_path / "whole", num_steps), 2, size=num_steps)
    assert whole[-1] == 20
    train_in_windows(*build(tmp_path / "cut", num_steps), 2, stop_after, size=num_steps)
    accelerator, *objects = build(tmp_path / "cut", num_steps)
    assert accelerator.resume("latest") is not None
    rest = train_in_windows(accelerator, *objects, 2, size=num_steps)
    assert len(rest) >= len(whole) - stop_after
    assert rest == whole[len(whole) - len(rest) :]


def test_collected_batches_do_not_count_once_another_pass_has_begun(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path, num_steps=4)
    train_in_windows(accelerator, model, optimizer, loader, num_epochs=1)
    for _ in loader:  # an evaluation on the training data, which collects up to 4 batches
        pass
    step(accelerator, model, optimizer, next(iter(loader)))
    assert accelerator.throughput.seen()["samples_seen"] == 10  # the loader was left, so its batch is unknown


def test_collected_batches_do_not_count_after_a_load(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path, num_steps=4)
    train_in_windows(accelerator, model, optimizer, loader, num_epochs=1, stop_after=4)
    batches = iter(loader)
    for first in islice(batches, 2):
        step(accelerator, model, optimizer, first)
    assert len(list(batches)) == 3
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    step(accelerator, model, optimizer, first)
    assert accelerator.throughput.seen()["samples_seen"] == 8


def test_batches_collected_before_a_stop_count(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path, num_steps=4)
    batches = iter(loader)
    step(accelerator, model, optimizer, next(batches))
    collected = [next(batches)]
    loader.stop()
    collected += batches
    step(accelerator, model, optimizer, *collected)
    assert accelerator.throughput.seen()["samples_seen"] == 4


def test_batches_read_in_a_pass_that_is_left_do_not_count(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path, num_steps=4)
    for index, lengths in enumerate(loader):
        if index == 3:
            break
        step(accelerator, model, optimizer, lengths)
    step(accelerator, model, optimizer, lengths[:1])
    assert accelerator.throughput.seen()["samples_seen"] == 6


def test_batches_collected_beyond_one_update_do_not_count(tmp_path):
    """With one micro-batch per update, collected batches look like those that the script leaves out."""
    assert train_in_windows(*build(tmp_path), num_epochs=1, size=3) == [2, 2, 2, 2, 2]
    accelerator, model, optimizer, loader = build(tmp_path, num_steps=4)
    for lengths in list(loader):
        step(accelerator, model, optimizer, lengths)
    assert accelerator.throughput.seen() == {"num_updates": 1}


@pytest.mark.parametrize(("num_steps", "num_counted"), [(1, 4), (2, 8), (4, 8)])
def test_batches_that_the_script_leaves_out_count_as_documented(num_steps, num_counted, tmp_path):
    """The script trains on every second batch. With one micro-batch per update, the one before it is known to be dropped."""
    accelerator, model, optimizer, loader = build(tmp_path, num_steps)
    for index, lengths in enumerate(loader):
        if index % 2:
            step(accelerator, model, optimizer, lengths)
    assert accelerator.throughput.seen()["samples_seen"] == num_counted


def test_batch_of_another_iterator_counts_as_documented(tmp_path):
    accelerator, model, optimizer, loader = build(tmp_path)
    others = iter(accelerator.prepare(DataLoader(LENGTHS, batch_size=2)))
    for lengths in loader:
        next(others)
        step(accelerator, model, optimizer, lengths)
    assert accelerator.throughput.seen()["samples_seen"] == 20
