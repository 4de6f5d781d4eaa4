"""Tests of streams with drop_last, workers, and resuming on other ranks, and of seeds and sparse tensors.

Streams once lost rows to drop_last and workers, or repeated rows after resuming on other ranks.
"""

import itertools

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headway import Accelerator, DataLoaderConfiguration, set_seed
from headway.errors import DataError
from tests.distributed.ranks import run_ranks


class Split(IterableDataset):
    """A stream whose rows are divided among the workers."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return itertools.islice(range(self.length), index, None, count)


LENGTHS = (22, 5, 12)


def read_split(num_workers, dispatches=None):
    """Return this rank's batches of two epochs, for each length."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    batches = {}
    for length in LENGTHS:
        loader = accelerator.prepare(_make_loader(length, num_workers))
        batches[length] = [[batch.tolist() for batch in loader] for _ in range(2)]
    return batches


def _make_loader(length, num_workers):
    context = "fork" if num_workers else None  # spawning a worker takes seconds
    return DataLoader(
        Split(length), batch_size=3, drop_last=True, num_workers=num_workers, multiprocessing_context=context
    )


@pytest.mark.parametrize(
    ("num_workers", "dispatches"),
    [
        (2, None),
        pytest.param(3, None, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(0, None, marks=pytest.mark.matrix),
    ],
)
def test_workers_drop_no_more_rows_than_plain_pytorch(num_workers, dispatches):
    ranks = run_ranks(read_split, 2, num_workers, dispatches)
    for length in LENGTHS:
        plain = (
            sum(1 for _ in _make_loader(length, num_workers)) // 2 * 2
        )  # a batch without a counterpart on the other rank is dropped
        for one, other in zip(ranks[0][length], ranks[1][length], strict=True):
            rows = [row for batch in one + other for row in batch]
            assert len(rows) == len(set(rows)) == 3 * plain, length
            assert all(len(batch) == 3 for batch in one + other)


def read_rest(num_workers, skipped):
    """Return this rank's batches after `skipped`, from an uninterrupted pass and from a resumed one."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(_make_loader(40, num_workers))
    whole = [batch.tolist() for batch in loader]
    state = None
    for number, _ in enumerate(loader, start=1):
        if number == skipped:
            state = loader.state_dict()
            break
    again = accelerator.prepare(_make_loader(40, num_workers))
    again.load_state_dict(state)
    return whole[skipped:], [batch.tolist() for batch in again]


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [1, 4, 5])
def test_pass_with_joined_last_batches_resumes_in_the_middle(skipped):
    for whole, rest in run_ranks(read_rest, 2, 2, skipped):
        assert rest == whole


# -------------------------------------------------------------------- resuming with other numbers of ranks and workers


def _make_hf_loader(num_workers=0, batch_size=2, num_shards=4):
    stream = datasets.Dataset.from_dict({"x": list(range(48))}).to_iterable_dataset(num_shards=num_shards)
    context = "fork" if num_workers else None
    return DataLoader(stream, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context)


def read_some(num_workers, num_shards, dispatches):
    """Return this rank's rows of the first three batches, and the loader's state after them."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = accelerator.prepare(_make_hf_loader(num_workers, num_shards=num_shards))
    rows = [batch["x"].tolist() for batch in itertools.islice(loader, 3)]
    return [row for batch in rows for row in batch], loader.state_dict()


def read_on(state, num_workers, batch_size, num_shards, dispatches):
    """Resume. Return this rank's remaining rows, or the error and the rows of a later epoch."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = accelerator.prepare(_make_hf_loader(num_workers, batch_size, num_shards))
    loader.load_state_dict(state)
    try:
        return [row for batch in loader for row in batch["x"][: loader.num_valid].tolist()]
    except DataError as error:
        loader.set_epoch(7)
        rows = [row for batch in loader for row in batch["x"][: loader.num_valid].tolist()]
        return str(error), rows


SAME, ONE, FOUR = (2, 2), (1, 4), (4, 1)
CASES = [  # workers, shards, dispatched; after resuming: (ranks, batch size), workers; whether it is exact
    pytest.param(0, 4, None, SAME, 0, True, marks=pytest.mark.slow),
    (0, 4, None, ONE, 0, True),
    pytest.param(0, 4, None, FOUR, 0, True, marks=pytest.mark.slow),
    pytest.param(0, 4, None, SAME, 2, True, marks=pytest.mark.slow),
    pytest.param(2, 4, None, SAME, 2, True, marks=pytest.mark.slow),
    pytest.param(2, 4, None, SAME, 1, False, marks=pytest.mark.matrix),
    pytest.param(0, 4, None, SAME, 1, True, marks=pytest.mark.matrix),
    pytest.param(0, 1, None, ONE, 0, True, marks=pytest.mark.slow),
    pytest.param(0, 1, None, FOUR, 1, True, marks=pytest.mark.matrix),
    (0, 4, True, ONE, 0, True),
    pytest.param(0, 4, True, FOUR, 0, True, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(
    ("num_workers", "num_shards", "dispatches", "new_layout", "new_num_workers", "is_exact"), CASES
)
def test_stream_resumes_exactly_or_is_refused(
    num_workers, num_shards, dispatches, new_layout, new_num_workers, is_exact
):
    first = run_ranks(read_some, 2, num_workers, num_shards, dispatches)
    state = first[0][1]
    (count, size) = new_layout
    results = run_ranks(read_on, count, state, new_num_workers, size, num_shards, dispatches)
    if is_exact:
        rows = [row for first_rows, _ in first for row in first_rows] + [row for rest in results for row in rest]
        assert sorted(rows) == list(range(48))
        return
    assert len({text for text, _ in results}) == 1
    assert "same number of ranks, the same num_workers and the same batch size" in results[0][0]
    assert sorted(row for _, rows in results for row in rows) == list(range(48))


# -------------------------------------------------------------------- seeds


def read_seeded(has_rank_seeds):
    """Return this rank's batches of six epochs, with a new seed before some of them."""
    accelerator = Accelerator(cpu=True)
    set_seed(1, device_specific=has_rank_seeds)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=4 // accelerator.num_processes, shuffle=True))
    return _read_epochs(loader, has_rank_seeds)


def _read_epochs(loader, has_rank_seeds=False):
    epochs = []
    for number in (None, 5, None, 5, 6, 6):
        if number is not None:
            set_seed(number, device_specific=has_rank_seeds)
        epochs.append([batch.tolist() for batch in loader])
        torch.rand(3)
    return epochs


@pytest.mark.parametrize("has_rank_seeds", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_seed_before_an_epoch_gives_the_same_order_on_any_number_of_ranks(has_rank_seeds):
    set_seed(1)
    plain = _read_epochs(DataLoader(range(24), batch_size=4, shuffle=True))
    first, second = run_ranks(read_seeded, 2, has_rank_seeds)
    merged = [[one + other for one, other in zip(*pair)] for pair in zip(first, second)]
    # Random numbers that training draws between epochs change only the order of a single process.
    seeded = (0, 1, 3, 4, 5)
    assert [merged[number] for number in seeded] == [plain[number] for number in seeded]
    assert plain[1] == plain[3] != merged[2]
    assert sorted(row for batch in merged[2] for row in batch) == list(range(24))
    assert run_ranks(read_seeded, 1, has_rank_seeds) == [plain]


# -------------------------------------------------------------------- sparse tensors


class Sparse(IterableDataset):
    """A stream of sparse rows with their numbers."""

    def __iter__(self):
        for row in range(8):
            dense = torch.zeros(4).index_fill(0, torch.tensor([row % 4]), row + 1.0)
            yield dense.to_sparse(), row


def _collate_sparse(samples):
    rows = torch.stack([row for row, _ in samples])
    return {"coo": rows, "csr": rows.to_dense().to_sparse_csr(), "row": torch.tensor([number for _, number in samples])}


def read_sparse(dispatches, is_map_style):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    dataset = list(Sparse()) if is_map_style else Sparse()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2, collate_fn=_collate_sparse))
    return [(each["row"].tolist(), each["coo"].to_dense().tolist(), each["csr"].to_dense().tolist()) for each in loader]


@pytest.mark.parametrize(("dispatches", "is_map_style"), [(True, False), (True, True), (None, True), (None, False)])
def test_sparse_tensors_are_dispatched_and_sharded(dispatches, is_map_style):
    expected = [
        (each["row"].tolist(), each["coo"].to_dense().tolist(), each["csr"].to_dense().tolist())
        for each in DataLoader(Sparse(), batch_size=2, collate_fn=_collate_sparse)
    ]
    first, second = run_ranks(read_sparse, 2, dispatches, is_map_style)
    assert [batch for pair in zip(first, second) for batch in pair] == expected
