"""Reported: streams lost rows to drop_last and workers, or read them twice after a resume on other ranks; seeds; sparse tensors."""

import itertools

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headway import Accelerator, DataLoaderConfiguration, set_seed
from headway.errors import DataError
from tests.distributed.ranks import run_ranks


class Split(IterableDataset):
    """Rows that workers share among them."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return itertools.islice(range(self.length), index, None, count)


LENGTHS = (22, 5, 12)


def read_split(num_workers, dispatches=None):
    """For each length, this rank's batches in two epochs."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    found = {}
    for length in LENGTHS:
        loader = accelerator.prepare(_dropping(length, num_workers))
        found[length] = [[batch.tolist() for batch in loader] for _ in range(2)]
    return found


def _dropping(length, num_workers):
    context = "fork" if num_workers else None  # as starting a worker anew takes seconds
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
def test_workers_drop_no_more_than_in_plain_torch(num_workers, dispatches):
    ranks = run_ranks(read_split, 2, num_workers, dispatches)
    for length in LENGTHS:
        plain = (
            sum(1 for _ in _dropping(length, num_workers)) // 2 * 2
        )  # what makes no round of both ranks cannot be read
        for one, other in zip(ranks[0][length], ranks[1][length], strict=True):
            rows = [row for batch in one + other for row in batch]
            assert len(rows) == len(set(rows)) == 3 * plain, length
            assert all(len(batch) == 3 for batch in one + other)


def read_rest(num_workers, skipped):
    """This rank's rows after a resume of the pass in its middle."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(_dropping(40, num_workers))
    whole = [batch.tolist() for batch in loader]
    state = None
    for number, _ in enumerate(loader, start=1):
        if number == skipped:
            state = loader.state_dict()
            break
    again = accelerator.prepare(_dropping(40, num_workers))
    again.load_state_dict(state)
    return whole[skipped:], [batch.tolist() for batch in again]


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [1, 4, 5])
def test_a_pass_whose_ends_are_joined_resumes_in_its_middle(skipped):
    for whole, rest in run_ranks(read_rest, 2, 2, skipped):
        assert rest == whole


# -------------------------------------------------------------------- on other ranks, with other workers


def _hf_loader(num_workers=0, batch_size=2, num_shards=4):
    stream = datasets.Dataset.from_dict({"x": list(range(48))}).to_iterable_dataset(num_shards=num_shards)
    context = "fork" if num_workers else None
    return DataLoader(stream, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context)


def read_some(num_workers, num_shards, dispatches):
    """This rank's rows of three batches, and the state after them."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = accelerator.prepare(_hf_loader(num_workers, num_shards=num_shards))
    rows = [batch["x"].tolist() for batch in itertools.islice(loader, 3)]
    return [row for batch in rows for row in batch], loader.state_dict()


def read_on(state, num_workers, batch_size, num_shards, dispatches):
    """This rank's rows after the resume, or the error; then those of the epoch after it."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = accelerator.prepare(_hf_loader(num_workers, batch_size, num_shards))
    loader.load_state_dict(state)
    try:
        return [row for batch in loader for row in batch["x"][: loader.num_valid].tolist()]
    except DataError as error:
        loader.set_epoch(7)
        rows = [row for batch in loader for row in batch["x"][: loader.num_valid].tolist()]
        return str(error), rows


SAME, ONE, FOUR = (2, 2), (1, 4), (4, 1)
CASES = [  # workers, shards, dispatched; then ranks and batch size, workers; exact?
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


@pytest.mark.parametrize(("num_workers", "num_shards", "dispatches", "now", "workers_now", "is_exact"), CASES)
def test_a_stream_goes_on_exactly_or_is_refused(num_workers, num_shards, dispatches, now, workers_now, is_exact):
    first = run_ranks(read_some, 2, num_workers, num_shards, dispatches)
    state = first[0][1]
    (count, size) = now
    found = run_ranks(read_on, count, state, workers_now, size, num_shards, dispatches)
    if is_exact:
        rows = [row for begun, _ in first for row in begun] + [row for rest in found for row in rest]
        assert sorted(rows) == list(range(48))
        return
    assert len({text for text, _ in found}) == 1
    assert "same number of ranks, the same num_workers and the same batch size" in found[0][0]
    assert sorted(row for _, rows in found for row in rows) == list(range(48))


# -------------------------------------------------------------------- seeds


def read_seeded(own_seed):
    """This rank's batches of four epochs; the generator is seeded before some of them."""
    accelerator = Accelerator(cpu=True)
    set_seed(1, device_specific=own_seed)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=4 // accelerator.num_processes, shuffle=True))
    return _epochs(loader, own_seed)


def _epochs(loader, own_seed=False):
    epochs = []
    for number in (None, 5, None, 5, 6, 6):
        if number is not None:
            set_seed(number, device_specific=own_seed)
        epochs.append([batch.tolist() for batch in loader])
        torch.rand(3)
    return epochs


@pytest.mark.parametrize("own_seed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_seed_before_an_epoch_decides_its_order_on_several_ranks_as_on_one(own_seed):
    set_seed(1)
    plain = _epochs(DataLoader(range(24), batch_size=4, shuffle=True))
    first, second = run_ranks(read_seeded, 2, own_seed)
    found = [[one + other for one, other in zip(*pair)] for pair in zip(first, second)]
    # What training draws in between moves the order of one process alone.
    seeded = (0, 1, 3, 4, 5)
    assert [found[number] for number in seeded] == [plain[number] for number in seeded]
    assert plain[1] == plain[3] != found[2]
    assert sorted(row for batch in found[2] for row in batch) == list(range(24))
    assert run_ranks(read_seeded, 1, own_seed) == [plain]


# -------------------------------------------------------------------- sparse tensors


class Sparse(IterableDataset):
    """Sparse rows in two layouts, and a dense one beside them."""

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
def test_sparse_tensors_are_dispatched_and_shared_out(dispatches, is_map_style):
    expected = [
        (each["row"].tolist(), each["coo"].to_dense().tolist(), each["csr"].to_dense().tolist())
        for each in DataLoader(Sparse(), batch_size=2, collate_fn=_collate_sparse)
    ]
    first, second = run_ranks(read_sparse, 2, dispatches, is_map_style)
    assert [batch for pair in zip(first, second) for batch in pair] == expected
