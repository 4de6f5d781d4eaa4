"""`gather_for_metrics` on real ranks: the whole loop through the Accelerator, kinds of values, and errors."""

import time

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import StateError
from tests.distributed.ranks import run_ranks
from tests.unit.core.data.fakes import Numbers, Stream
from tests.unit.core.training.test_metrics import make_values

LENGTHS = (0, 1, 2, 5, 12, 13, 25, 50)


def flatten_batches(batches):
    return [int(value) for batch in batches for value in batch]


def evaluate(acc, loader, values=lambda batch: batch, **options):
    return [acc.gather_for_metrics(values(batch), **options) for batch in loader]


def gather_all():
    out = {}
    for even_batches in (True, False):
        acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
        for n in LENGTHS:
            out["map", n, even_batches] = flatten_batches(
                evaluate(acc, acc.prepare(DataLoader(Numbers(n), batch_size=4)))
            )
            out["stream", n, even_batches] = sorted(
                flatten_batches(evaluate(acc, acc.prepare(DataLoader(Stream(n), batch_size=4))))
            )
        made = evaluate(acc, acc.prepare(DataLoader(Numbers(14), batch_size=5)), make_values)
        out["kinds", even_batches] = {
            "cube": torch.cat([each["cube"] for each in made]),
            "array": numpy.concatenate([each["array"] for each in made]),
            "ragged": [item.tolist() for each in made for item in each["ragged"]],
            "text": [item for each in made for item in each["text"]],
            "objects": [item for each in made for item in each["objects"]],
        }
    count = acc.num_processes
    expected = list(range(3, 12))
    out["sampler"] = sorted(
        flatten_batches(evaluate(acc, acc.prepare(_load_with_sampler(SubsetRandomSampler(expected)))))
    )
    batches = DataLoader(Numbers(16), batch_sampler=BatchSampler(expected, 4, False))
    out["batch sampler"] = flatten_batches(evaluate(acc, acc.prepare(batches)))
    loader = acc.skip_first_batches(acc.prepare(DataLoader(Numbers(13), batch_size=2)), 1)
    out["skipped"] = (flatten_batches(evaluate(acc, loader)), list(range(13))[2 * count :])
    out["nested"] = _gather_in_nested_loops(acc)
    out["lists"] = evaluate(acc, acc.prepare(DataLoader(Numbers(3), batch_size=1)), lambda b: [b, b])
    return out


def _load_with_sampler(sampler):
    return DataLoader(Numbers(16), batch_size=4, sampler=sampler)


def _gather_in_nested_loops(acc):
    outer = acc.prepare(DataLoader(Numbers(7), batch_size=2))
    inner = acc.prepare(DataLoader(Numbers(5), batch_size=3))
    seen, evaluated = [], []
    for batch in outer:
        for other in inner:
            evaluated.append(acc.gather_for_metrics(other))
            break
        evaluated += evaluate(acc, inner)
        seen.append(acc.gather_for_metrics(batch, loader=outer))
    message = None
    try:
        acc.gather_for_metrics(torch.ones(2), loader=outer)
    except StateError as error:
        message = str(error)
    return flatten_batches(seen), flatten_batches(evaluated), message


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_metrics_are_exact(world_size):
    start = time.monotonic()
    expected = make_values(torch.arange(14))
    for out in run_ranks(gather_all, world_size):
        for even_batches in (True, False):
            for n in LENGTHS:
                assert out["map", n, even_batches] == list(range(n))
                assert out["stream", n, even_batches] == list(range(n))
            seen = out["kinds", even_batches]
            assert torch.equal(seen["cube"], expected["cube"])
            assert (seen["array"] == expected["array"]).all()
            assert seen["ragged"] == [item.tolist() for item in expected["ragged"]]
            assert (seen["text"], seen["objects"]) == (expected["text"], expected["objects"])
        assert out["sampler"] == out["batch sampler"] == list(range(3, 12))
        assert out["skipped"][0] == out["skipped"][1]
        outer, inner, message = out["nested"]
        num_steps = -(-7 // (2 * world_size))
        assert outer == list(range(7))
        assert inner == (list(range(min(5, 3 * world_size))) + list(range(5))) * num_steps
        assert "outside that loader's loop" in message
        assert (
            flatten_batches(left for left, _ in out["lists"])
            == flatten_batches(right for _, right in out["lists"])
            == [0, 1, 2]
        )
    assert time.monotonic() - start < 90
