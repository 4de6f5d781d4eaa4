"""Training with mixtures and token-based batches on several ranks: equal to plain PyTorch, and resumed exactly."""

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, Mixture, SourceLosses, TokenBatchSampler
from tests.distributed.ranks import run_ranks

LENGTHS = numpy.clip(numpy.random.default_rng(0).lognormal(2, 0.8, 120), 2, 60).astype(int).tolist()
TOKENS = 120


def build_sample(index):
    draw = torch.Generator().manual_seed(index)
    return torch.randint(1, 17, (LENGTHS[index],), generator=draw)


def pad(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def build_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(17, 8), torch.nn.Linear(8, 17)).double()


def sum_losses(logits, batch):
    """Return the sum of the next-token losses of a batch and the number of predicted tokens."""
    labels = batch[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, ignore_index=0, reduction="sum")
    return losses, (labels != 0).sum()


def train_on_token_batches():
    sampler = TokenBatchSampler(LENGTHS, TOKENS, global_batch_tokens=4 * TOKENS, seed=5)
    samples = [build_sample(index) for index in range(len(LENGTHS))]
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=pad)
    probe = Accelerator(cpu=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=sampler.count_steps(probe.num_processes))
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, num_tokens = sum_losses(model(batch), batch)
                accelerator.backward(loss, weight=num_tokens, reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
    return [each.detach() for each in accelerator.unwrap_model(model).parameters()]


def train_on_token_batches_in_plain_torch():
    sampler = TokenBatchSampler(LENGTHS, TOKENS, global_batch_tokens=4 * TOKENS, seed=5)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        plan = list(sampler)
        assert sorted(index for batch in plan for index in batch) == list(range(len(LENGTHS)))
        for start in range(0, len(plan), 4):
            parts = []
            for indices in plan[start : start + 4]:
                batch = pad([build_sample(index) for index in indices])
                parts.append(sum_losses(model(batch), batch))
            (sum(loss for loss, _ in parts) / sum(number for _, number in parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_token_batches_weight_each_token_equally(world_size):
    expected = train_on_token_batches_in_plain_torch()
    for found in run_ranks(train_on_token_batches, world_size):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------- mixtures

SOURCES = {"web": 70, "code": 30, "math": 11}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, first, length):
        self.first = first
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": torch.tensor([float(self.first + index)], dtype=torch.float64)}


def build_mixture(ends="repeat"):
    sources = {name: Numbers(1000 * at, length) for at, (name, length) in enumerate(SOURCES.items())}
    return Mixture(sources, weights=[0.5, 0.3, 0.2], seed=6, when_source_ends=ends)


def train_on_mixture(ends, num_workers, begin, stop, save_to):
    """Train two epochs with 8 samples per update, from a checkpoint or the start, until the end or for `stop` updates.

    Returns:
        The samples of each update, and the final weights, or None after a stop.
    """
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    loader = DataLoader(build_mixture(ends), batch_size=8 // accelerator.num_processes, num_workers=num_workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if begin is not None:
        accelerator.resume(begin)
    updates = []
    for _ in accelerator.epochs(2):
        for batch in loader:
            with accelerator.accumulate(model):
                losses = model(batch["x"]).square()[:, 0] * loader.mask
                accelerator.backward(losses.sum(), weight=loader.mask.sum(), reduction="sum")
                optimizer.step()
                optimizer.zero_grad()
            pairs = torch.cat([batch["x"], batch["source"][:, None].double()], dim=1)
            updates.append(accelerator.gather_for_metrics(pairs).tolist())
            if len(updates) == stop:
                accelerator.save_state(save_to)
                return updates, None
    return updates, [each.detach() for each in accelerator.unwrap_model(model).parameters()]


def train_on_mixture_in_plain_torch(ends):
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    mixture = build_mixture(ends)
    updates = []
    for epoch in range(2):
        mixture.set_epoch(epoch)
        for start in range(0, len(mixture), 8):
            samples = [mixture[at] for at in range(start, min(start + 8, len(mixture)))]
            model(torch.stack([sample["x"] for sample in samples])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            updates.append([[sample["x"].item(), float(sample["source"])] for sample in samples])
    return updates, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize(
    ("ends", "ranks", "workers"),
    [
        ("repeat", (1, 2, 1), (0, 1, 0)),
        ("drop", (2, 1, 2), (0, 0, 1)),
        pytest.param("drop", (2, 4, 1), (3, 0, 1), marks=pytest.mark.slow),
        pytest.param("stop", (4, 1, 2), (0, 3, 0), marks=pytest.mark.slow),
    ],
)
def test_run_resumed_twice_on_other_ranks_and_workers_matches_plain_pytorch(tmp_path, ends, ranks, workers):
    updates, weights = train_on_mixture_in_plain_torch(ends)
    draw = random.Random(str(ranks))
    found, begin = [], None
    for part in range(3):
        stop = draw.randint(1, len(updates) // 2 - 1) if part < 2 else None
        save_to = str(tmp_path / f"stop {part}")
        results = run_ranks(train_on_mixture, ranks[part], ends, workers[part], begin, stop, save_to)
        found += results[0][0]
        begin = save_to
    assert found == updates
    for _, trained in results:
        torch.testing.assert_close(trained, weights, rtol=1e-12, atol=0)


# -------------------------------------------------------------------- loss by source


def compute_source_losses():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(build_mixture("drop"), batch_size=4))
    losses = SourceLosses(accelerator, build_mixture().names)
    by_row, by_token = [], SourceLosses(accelerator, build_mixture().names, prefix="token/")
    for number, batch in enumerate(loader, start=1):
        losses.add(batch["x"][:, 0], batch["source"], mask=loader.mask)
        tokens = torch.stack([batch["x"][:, 0], torch.full_like(batch["x"][:, 0], float("nan"))], dim=1)
        counted = torch.stack([loader.mask, torch.zeros_like(loader.mask)], dim=1)
        by_token.add(tokens, batch["source"], mask=counted)
        if number * 4 * accelerator.num_processes % 32 == 0:
            by_row.append(losses.compute())
    return [*by_row, losses.compute()], by_token.compute()


@pytest.mark.parametrize("world_size", [1, 2])
def test_source_losses_are_means_over_their_rows(world_size):
    mixture = build_mixture("drop")
    rows = [(mixture.names[sample["source"]], sample["x"].item()) for sample in map(mixture.__getitem__, range(111))]

    def compute_means(rows, prefix):
        by_name = {name: [value for each, value in rows if each == name] for name in mixture.names}
        return {f"{prefix}{name}": sum(values) / len(values) for name, values in by_name.items() if values}

    expected = [compute_means(rows[start : start + 32], "loss/") for start in range(0, 111, 32)]
    for by_row, by_token in run_ranks(compute_source_losses, world_size):
        assert [each.keys() for each in by_row] == [each.keys() for each in expected]
        assert all(each == pytest.approx(expected_means) for each, expected_means in zip(by_row, expected))
        assert by_token == pytest.approx(compute_means(rows, "token/"))
