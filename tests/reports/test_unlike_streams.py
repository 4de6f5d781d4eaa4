"""Tests of streams that shuffle or split themselves. Sharding them again once repeated and skipped rows, or hung at the end."""

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator
from tests.distributed.ranks import run_ranks
from tests.reports import stream_cases
from tests.reports.stream_cases import LIKE, ROWS, UNLIKE, Stream, WarningRecorder, read_all, read_like, read_unlike


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.matrix), pytest.param(2, marks=pytest.mark.slow)]
)
def test_streams_that_differ_between_ranks_are_refused_on_all_ranks(num_workers):
    first, second = run_ranks(read_unlike, 2, num_workers)
    for name in UNLIKE:
        assert first[name] == second[name], name
        assert first[name].startswith("DataError: the"), name
        assert "seed" in first[name], name
        assert "dispatch_batches=True" in first[name], name


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.matrix), pytest.param(2, marks=pytest.mark.slow)]
)
def test_equal_streams_are_read_once(num_workers):
    (first, warnings), (second, _) = run_ranks(read_like, 2, num_workers)
    assert warnings == []
    for name in LIKE:
        # As in plain PyTorch, each worker reads all rows of a data set that ignores get_worker_info().
        times = 1 if name.startswith("datasets") else max(1, num_workers)
        for one, other in zip(first[name], second[name], strict=True):
            assert sorted(one + other) == sorted(list(range(ROWS)) * times), name
        if "global generator" in name:
            assert len({tuple(epoch) for epoch in first[name]}) == 2, name


def test_one_process_reads_all_streams():
    (results,) = run_ranks(read_all_cases, 1)
    for name, epochs in results.items():
        assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2, name


def read_all_cases():
    return read_all(UNLIKE | LIKE)


def read_dispatched():
    return read_all({name: UNLIKE[name] for name in UNLIKE if "every" not in name}, dispatch_batches=True)


def test_rank_zero_dispatches_to_all_ranks_on_request():
    first, second = run_ranks(read_dispatched, 2)
    for name in ("datasets with shards, shuffled", "an own random.Random"):
        assert [sorted(one + other) for one, other in zip(first[name], second[name])] == [list(range(ROWS))] * 2, name


# -------------------------------------------------------------------- lengths


def train_on_unequal_lengths(extra, num_steps):
    """Train for two epochs. Return the rows of this rank by epoch, the weight and the warnings."""
    recorder = WarningRecorder()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    length = 20 + extra * accelerator.process_index
    stream = Stream(lambda: (torch.tensor([float(row)]) for row in range(length)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(stream, batch_size=2))
    epochs = []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            epochs[-1] += batch[: loader.num_valid, 0].int().tolist()
    return epochs, model.weight.item(), recorder.texts


def train_by_hand(num_rounds, num_steps):
    weight = 1.0
    for _ in range(2):
        for begin in range(0, num_rounds, num_steps):
            rows = torch.arange(begin * 4.0, min(num_rounds, begin + num_steps) * 4.0)
            weight -= 1e-3 * rows.mean().item()
    return weight


@pytest.mark.parametrize(
    ("extra", "num_steps", "num_rounds"),
    [(5, 1, 5), pytest.param(-3, 1, 4, marks=pytest.mark.slow), pytest.param(1, 2, 5, marks=pytest.mark.slow)],
)
def test_stream_that_ends_earlier_on_one_rank_ends_on_all_with_a_warning(extra, num_steps, num_rounds):
    ranks = run_ranks(train_on_unequal_lengths, 2, extra, num_steps, timeout=60)
    (warning,) = ranks[0][2]
    assert "ends earlier on some ranks than on others" in warning
    for epochs in zip(*(epochs for epochs, _, _ in ranks)):
        assert sorted(epochs[0] + epochs[1]) == list(range(4 * num_rounds))
    assert [weight for _, weight, _ in ranks] == pytest.approx([train_by_hand(num_rounds, num_steps)] * 2)


# -------------------------------------------------------------------- Accelerate's API


def read_with_accelerate_api(is_real, num_workers, config):
    """Return each batch of this rank, read with Accelerate or with Headway's Accelerate API."""
    if is_real:
        from accelerate import Accelerator as Kind
        from accelerate import DataLoaderConfiguration
    else:
        from headway import DataLoaderConfiguration
        from headway.compat.accelerate.accelerator import AccelerateAccelerator as Kind
    accelerator = Kind(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    results = {}
    for name in ("an own NumPy generator", "an own random.Random", "datasets with shards", "every n-th row", "lengths"):
        make = (
            stream_cases.LIKE["datasets with shards, one seed"] if name == "datasets with shards" else UNLIKE.get(name)
        )
        rank = accelerator.process_index
        dataset = Stream(lambda: range(20 + 3 * rank)) if make is None else make(rank, accelerator.num_processes)
        context, size = "fork" if num_workers else None, 4 if config else 3
        loader = accelerator.prepare(
            DataLoader(dataset, batch_size=size, num_workers=num_workers, multiprocessing_context=context)
        )
        epochs = []
        for _ in range(2):
            batches = [(batch["label"] if isinstance(batch, dict) else batch).tolist() for batch in loader]
            epochs.append((batches, loader.end_of_dataloader))
        results[name] = epochs, type(loader).__name__
    return results


@pytest.mark.parametrize(
    ("num_workers", "config"),
    [
        (0, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(0, {"split_batches": True}, marks=pytest.mark.matrix),
        pytest.param(0, {"dispatch_batches": True}, marks=pytest.mark.matrix),
    ],
)
def test_accelerate_api_reads_on_rank_zero_like_accelerate(num_workers, config):
    config = dict(config)
    real = run_ranks(read_with_accelerate_api, 2, True, num_workers, config)
    ours = run_ranks(read_with_accelerate_api, 2, False, num_workers, config)
    assert ours == real
