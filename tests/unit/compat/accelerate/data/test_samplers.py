"""Test that samplers, dataset shards and loaders that scripts build by hand give the same indices as Accelerate's."""

from itertools import product

import accelerate.data_loader as theirs
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from headway.compat.accelerate.data import loaders
from headway.compat.accelerate.data import samplers as ours

LENGTHS = [*range(14), 23, 24, 25]


class Ragged:
    """Batch sampler whose batches differ in length and which has no batch size."""

    def __init__(self, num_batches):
        self.batches = [list(range(10 * n, 10 * n + n % 3 + 1)) for n in range(num_batches)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter([list(batch) for batch in self.batches])


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


class Shuffled(Stream):
    """Stream shuffled by its own generator, which a shard seeds by the epoch."""

    def __init__(self, length):
        super().__init__(length)
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_batch_sampler_shards_equal_accelerates(num_processes, split):
    num_cases = 0
    for length, size, drop, even in product(LENGTHS, (1, 2, 3, 4, 6), (False, True), (False, True)):
        if split and size % num_processes:
            continue
        for index in range(num_processes):
            one, other = (
                kind.BatchSamplerShard(
                    BatchSampler(SequentialSampler(range(length)), size, drop), num_processes, index, split, even
                )
                for kind in (theirs, ours)
            )
            case = (length, size, drop, even, index)
            assert list(other) == list(one), case
            assert (len(other), other.total_length) == (len(one), one.total_length), case
            assert (other.batch_size, other.drop_last) == (one.batch_size, one.drop_last)
            num_cases += 1
    assert num_cases > 60


@pytest.mark.parametrize("even", [False, True])
def test_batches_of_different_lengths_are_split_like_accelerates(even):
    for num_batches, num_processes in product(range(10), (1, 2, 3)):
        for index in range(num_processes):
            one, other = (
                kind.BatchSamplerShard(Ragged(num_batches), num_processes, index, even_batches=even)
                for kind in (theirs, ours)
            )
            assert list(other) == list(one), (num_batches, num_processes, index)


def test_batch_size_that_cannot_be_split_is_refused():
    for kind in (theirs, ours):
        with pytest.raises(ValueError, match="3"):
            kind.BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 3, False), 2, 0, True)
        with pytest.raises(ValueError, match="3"):
            kind.IterableDatasetShard(Stream(9), 3, False, 2, 0, True)


def test_dataset_shards_equal_accelerates():
    num_cases = 0
    for length, size, drop, count, split in product(LENGTHS, (1, 2, 4), (False, True), (1, 2, 4), (False, True)):
        if split and size % count:
            continue
        for index in range(count):
            one, other = (
                kind.IterableDatasetShard(Stream(length), size, drop, count, index, split) for kind in (theirs, ours)
            )
            assert list(other) == list(one), (length, size, drop, count, index, split)
            assert len(other) == len(one)
            num_cases += 1
    assert num_cases > 400


def test_generator_of_a_stream_follows_the_epoch():
    one, other = (kind.IterableDatasetShard(Shuffled(9), 2, False, 2, 1) for kind in (theirs, ours))
    for epoch in (0, 3, 4):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(other) == list(one)


@pytest.mark.parametrize("options", [{"data_seed": 7}, {"data_seed": 7, "replacement": True, "num_samples": 5}, {}])
def test_seeded_orders_equal_accelerates(options):
    torch.manual_seed(3)
    one, other = (kind.SeedableRandomSampler(range(11), **options) for kind in (theirs, ours))
    orders = [list(one) for _ in range(3)]
    assert [list(other) for _ in range(3)] == orders
    assert len({tuple(each) for each in orders}) == 3
    one.set_epoch(1)
    other.set_epoch(1)
    assert (list(other), other.epoch, other.initial_seed) == (list(one), one.epoch, one.initial_seed)
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    one, other = (
        kind.SeedableRandomSampler(range(11), data_seed=2, generator=generator)
        for kind, generator in zip((theirs, ours), generators)
    )
    assert list(other) == list(one)


def test_skipping_samplers_and_loaders_equal_accelerates():
    for count in range(5):
        batches = BatchSampler(SequentialSampler(range(10)), 3, False)
        one, other = (kind.SkipBatchSampler(batches, count) for kind in (theirs, ours))
        assert (list(other), len(other), other.total_length) == (list(one), len(one), one.total_length)
        one, other = (kind.SkipDataLoader(list(range(10)), count, batch_size=3) for kind in (theirs, ours))
        assert [each.tolist() for each in other] == [each.tolist() for each in one]
        assert len(other) == len(one)
        one, other = (kind.SkipDataLoader(list(range(10)), count, True, batch_size=3) for kind in (theirs, ours))
        assert [each.tolist() for each in other] == [each.tolist() for each in one]


def test_skipping_more_batches_than_there_are_leaves_none():
    """The `len()` of Accelerate's sampler raises ValueError, and so does `list()`, which calls it."""
    batches = BatchSampler(SequentialSampler(range(10)), 3, False)
    one, other = (kind.SkipBatchSampler(batches, 5) for kind in (theirs, ours))
    assert [*iter(one)] == []
    assert list(other) == []
    assert len(other) == 0


def test_get_sampler_finds_the_innermost_sampler():
    sampler = SequentialSampler(range(6))
    batches = BatchSampler(sampler, 2, False)
    for loader in (
        DataLoader(range(6), sampler=sampler, batch_size=2),
        DataLoader(range(6), batch_sampler=batches),
        DataLoader(range(6), sampler=batches, batch_size=None),
        DataLoader(range(6), batch_sampler=Ragged(2)),
    ):
        assert ours.get_sampler(loader) is theirs.get_sampler(loader)


@pytest.mark.parametrize(("split", "even", "drop"), list(product((False, True), (False, True), (False, True))))
def test_prepare_data_loader_splits_like_accelerates(split, even, drop):
    for length, index in product((8, 16, 19), (0, 1)):
        one, other = (
            kind.prepare_data_loader(
                DataLoader(range(length), batch_size=4, drop_last=drop),
                num_processes=2,
                process_index=index,
                split_batches=split,
                even_batches=even,
            )
            for kind in (theirs, loaders)
        )
        # All ranks of Headway have equally many batches. A rank without rows gets a filler batch of weight 0.
        found = [each.tolist() for each in other if even or other.num_valid]
        assert found == [each.tolist() for each in one], (length, index)
        assert not isinstance(other, loaders.DataLoaderDispatcher)


def test_seedable_order_of_one_process_equals_accelerates():
    def prepare(kind, **options):
        torch.manual_seed(4)
        loader = DataLoader(range(9), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
        return kind.prepare_data_loader(loader, put_on_device=True, **options)

    one, other = prepare(theirs), prepare(loaders)
    assert [each.tolist() for each in other] == [each.tolist() for each in one]
    dispatched = prepare(loaders, dispatch_batches=True)
    assert sorted(row for each in dispatched for row in each.tolist()) == list(range(9))
