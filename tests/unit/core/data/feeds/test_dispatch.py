"""One process reads for all; ranks are threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler

from headway.errors import DataError
from tests.unit.core.data.fakes import Numbers, SizedStream, Stream, joined, on_ranks, prepare, read


def dispatched(count, make, num_batches=None, state=None, num_skipped=0, **config):
    def main(rank, collectives):
        loader = prepare(make(), rank, count, collectives, dispatch_batches=True, **config)
        if state is not None:
            loader.load_state_dict(state)
        if num_skipped:
            loader = loader.skip(num_skipped)
        batches = read(loader, num_batches)
        return batches, loader.state_dict(), loader

    return zip(*on_ranks(count, main))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 30), count=st.integers(2, 4), size=st.integers(1, 5), is_stream=st.booleans(),
    drop_last=st.booleans(), even_batches=st.booleans(), split_batches=st.booleans(),
)  # fmt: skip
def test_counts_are_exact(n, count, size, is_stream, drop_last, even_batches, split_batches):
    def make():
        dataset = SizedStream(n) if is_stream else Numbers(n)
        return DataLoader(dataset, batch_size=size * count if split_batches else size, drop_last=drop_last)

    ranks, _, loaders = dispatched(count, make, even_batches=even_batches, split_batches=split_batches)
    assert joined(ranks) == list(range(n - n % (size * count) if drop_last else n))
    assert {len(batches) for batches in ranks} == {len(loaders[0])}


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_only_the_main_process_reads(kind):
    made = []

    def make():
        made.append(kind(8))
        return DataLoader(made[-1], batch_size=2)

    list(dispatched(2, make))
    seen = sorted(getattr(dataset, "fetched", None) or getattr(dataset, "read", []) for dataset in made)
    assert seen == [[], list(range(8))]


def test_ragged_batches_of_any_kind():
    def collate(rows):
        length = max(map(int, rows))
        return {"ids": torch.zeros(len(rows), length), "names": [str(int(row)) for row in rows], "deep": {"n": length}}

    def main(rank, collectives):
        loader = DataLoader(Numbers(7), batch_size=2, collate_fn=collate)
        return list(prepare(loader, rank, 2, collectives, dispatch_batches=True, even_batches=False))

    first, second = on_ranks(2, main)
    assert [tuple(batch["ids"].shape) for batch in first] == [(2, 1), (2, 5)]
    assert [tuple(batch["ids"].shape) for batch in second] == [(2, 3), (1, 6)]
    assert [batch["names"] for batch in second] == [["2", "3"], ["6"]]
    assert second[1]["deep"] == {"n": 6}


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_skipping_counts_steps(kind):
    """D4 of the inventory."""
    ranks, _, _ = dispatched(2, lambda: DataLoader(kind(16), batch_size=2), num_skipped=1)
    assert joined(ranks) == list(range(4, 16))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_it_resumes(kind):
    begun, states, _ = dispatched(2, lambda: DataLoader(kind(15), batch_size=2), num_batches=2)
    rest, _, _ = dispatched(3, lambda: DataLoader(kind(15), batch_size=2), state=states[0])
    assert joined(begun) + joined(rest) == list(range(15))
    assert {state["consumed"] for state in states} == {8}


def test_a_custom_sampler_draws_once():
    def make():
        return DataLoader(Numbers(20), batch_size=3, sampler=SubsetRandomSampler(range(20)))

    ranks, _, _ = dispatched(2, make)
    assert sorted(joined(ranks)) == list(range(20))


def test_unbatched_items():
    items = [torch.arange(row * 10, row * 10 + 1 + row % 3) for row in range(5)]
    ranks, _, _ = dispatched(3, lambda: DataLoader(items, batch_size=None))
    assert joined(ranks) == [row for item in items for row in item.tolist()]
    with pytest.raises(DataError, match="the item for rank 0 contains no tensor"):
        list(dispatched(2, lambda: DataLoader(["a", "b"], batch_size=None)))


def test_an_error_reaches_every_rank():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("gone")
            return super().__getitem__(index)

    def main(rank, collectives):
        loader = prepare(DataLoader(Broken(8), batch_size=2), rank, 2, collectives, dispatch_batches=True)
        with pytest.raises(KeyError if rank == 0 else DataError, match="gone"):
            list(loader)
        return True

    assert on_ranks(2, main) == [True, True]


def test_one_process_has_nothing_to_dispatch():
    loader = prepare(DataLoader(Numbers(5), batch_size=2), dispatch_batches=True)
    assert joined([read(loader)]) == list(range(5))


def test_the_length_is_the_main_processs():
    """The others may not reach the data at all."""

    def main(rank, collectives):
        return len(prepare(DataLoader(Numbers(9 if rank == 0 else 1)), rank, 2, collectives, dispatch_batches=True))

    assert on_ranks(2, main) == [5, 5]


def test_sizes_are_known_on_every_rank():
    _, _, loaders = dispatched(2, lambda: DataLoader(Numbers(9), batch_size=2))
    assert {(len(loader), loader.total_batch_size) for loader in loaders} == {(3, 4)}
    for loader in loaders:
        loader.even_batches = False
        assert loader.even_batches is False
