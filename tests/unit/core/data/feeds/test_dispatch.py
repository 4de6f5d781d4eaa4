"""Test dispatched loading, in which one process reads for all ranks. The ranks are threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler

from headway.errors import DataError
from tests.unit.core.data.fakes import Numbers, SizedStream, Stream, join_real_rows, prepare, read_batches, run_on_ranks


def read_dispatched(count, make, num_batches=None, state=None, num_skipped_steps=0, **config):
    """Return the batches, states and loaders of all ranks."""

    def run_rank(rank, collectives):
        loader = prepare(make(), rank, count, collectives, dispatch_batches=True, **config)
        if state is not None:
            loader.load_state_dict(state)
        if num_skipped_steps:
            loader = loader.skip(num_skipped_steps)
        batches = read_batches(loader, num_batches)
        return batches, loader.state_dict(), loader

    return zip(*run_on_ranks(count, run_rank))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 30), count=st.integers(2, 4), size=st.integers(1, 5), is_stream=st.booleans(),
    drop_last=st.booleans(), even_batches=st.booleans(), split_batches=st.booleans(),
)  # fmt: skip
def test_real_row_counts_are_exact(n, count, size, is_stream, drop_last, even_batches, split_batches):
    def make():
        dataset = SizedStream(n) if is_stream else Numbers(n)
        return DataLoader(dataset, batch_size=size * count if split_batches else size, drop_last=drop_last)

    ranks, _, loaders = read_dispatched(count, make, even_batches=even_batches, split_batches=split_batches)
    assert join_real_rows(ranks) == list(range(n - n % (size * count) if drop_last else n))
    assert {len(batches) for batches in ranks} == {len(loaders[0])}


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_only_the_main_process_reads(kind):
    made = []

    def make():
        made.append(kind(8))
        return DataLoader(made[-1], batch_size=2)

    list(read_dispatched(2, make))
    seen = sorted(getattr(dataset, "fetched", None) or getattr(dataset, "read", []) for dataset in made)
    assert seen == [[], list(range(8))]


def test_ragged_batches_of_any_type_are_dispatched():
    def collate(rows):
        length = max(map(int, rows))
        return {"ids": torch.zeros(len(rows), length), "names": [str(int(row)) for row in rows], "deep": {"n": length}}

    def run_rank(rank, collectives):
        loader = DataLoader(Numbers(7), batch_size=2, collate_fn=collate)
        return list(prepare(loader, rank, 2, collectives, dispatch_batches=True, even_batches=False))

    first, second = run_on_ranks(2, run_rank)
    assert [tuple(batch["ids"].shape) for batch in first] == [(2, 1), (2, 5)]
    assert [tuple(batch["ids"].shape) for batch in second] == [(2, 3), (1, 6)]
    assert [batch["names"] for batch in second] == [["2", "3"], ["6"]]
    assert second[1]["deep"] == {"n": 6}


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_skipping_counts_batches_of_all_ranks(kind):
    ranks, _, _ = read_dispatched(2, lambda: DataLoader(kind(16), batch_size=2), num_skipped_steps=1)
    assert join_real_rows(ranks) == list(range(4, 16))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_dispatched_loader_resumes_on_other_ranks(kind):
    begun, states, _ = read_dispatched(2, lambda: DataLoader(kind(15), batch_size=2), num_batches=2)
    rest, _, _ = read_dispatched(3, lambda: DataLoader(kind(15), batch_size=2), state=states[0])
    assert join_real_rows(begun) + join_real_rows(rest) == list(range(15))
    assert {state["consumed"] for state in states} == {8}


def test_custom_sampler_draws_once():
    def make():
        return DataLoader(Numbers(20), batch_size=3, sampler=SubsetRandomSampler(range(20)))

    ranks, _, _ = read_dispatched(2, make)
    assert sorted(join_real_rows(ranks)) == list(range(20))


def test_unbatched_items_are_dispatched_by_rows():
    items = [torch.arange(row * 10, row * 10 + 1 + row % 3) for row in range(5)]
    ranks, _, _ = read_dispatched(3, lambda: DataLoader(items, batch_size=None))
    assert join_real_rows(ranks) == [row for item in items for row in item.tolist()]
    with pytest.raises(DataError, match="the item for rank 0 contains no tensor"):
        list(read_dispatched(2, lambda: DataLoader(["a", "b"], batch_size=None)))


def test_error_reaches_every_rank():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("gone")
            return super().__getitem__(index)

    def run_rank(rank, collectives):
        loader = prepare(DataLoader(Broken(8), batch_size=2), rank, 2, collectives, dispatch_batches=True)
        with pytest.raises(KeyError if rank == 0 else DataError, match="gone"):
            list(loader)
        return True

    assert run_on_ranks(2, run_rank) == [True, True]


def test_one_process_has_nothing_to_dispatch():
    loader = prepare(DataLoader(Numbers(5), batch_size=2), dispatch_batches=True)
    assert join_real_rows([read_batches(loader)]) == list(range(5))


def test_length_is_that_of_the_main_process():
    """Other ranks may be unable to reach the data."""

    def run_rank(rank, collectives):
        return len(prepare(DataLoader(Numbers(9 if rank == 0 else 1)), rank, 2, collectives, dispatch_batches=True))

    assert run_on_ranks(2, run_rank) == [5, 5]


def test_sizes_are_known_on_every_rank():
    _, _, loaders = read_dispatched(2, lambda: DataLoader(Numbers(9), batch_size=2))
    assert {(len(loader), loader.total_batch_size) for loader in loaders} == {(3, 4)}
    for loader in loaders:
        loader.even_batches = False
        assert loader.even_batches is False
