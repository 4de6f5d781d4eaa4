"""Samplers, shards and loaders as scripts build them by hand: the same indices as the real package, everywhere."""

from itertools import product

import accelerate.data_loader as theirs
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from headway.compat.accelerate.data import loaders
from headway.compat.accelerate.data import samplers as ours

LENGTHS = [*range(14), 23, 24, 25]


class Ragged:
    """Batches of any length, with no batch size."""

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
    """With a generator of its own, which a shard seeds by its epoch."""

    def __init__(self, length):
        super().__init__(length)
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_batches_are_shared_alike(num_processes, split):
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
def test_batches_of_any_length_are_shared_alike(even):
    for num_batches, num_processes in product(range(10), (1, 2, 3)):
        for index in range(num_processes):
            one, other = (
                kind.BatchSamplerShard(Ragged(num_batches), num_processes, index, even_batches=even)
                for kind in (theirs, ours)
            )
            assert list(other) == list(one), (num_batches, num_processes, index)


def test_what_cannot_be_split_is_an_error():
    for kind in (theirs, ours):
        with pytest.raises(ValueError, match="3"):
            kind.BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 3, False), 2, 0, True)
        with pytest.raises(ValueError, match="3"):
            kind.IterableDatasetShard(Stream(9), 3, False, 2, 0, True)


def test_streams_are_shared_alike():
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


def test_a_streams_own_generator_follows_the_epoch():
    one, other = (kind.IterableDatasetShard(Shuffled(9), 2, False, 2, 1) for kind in (theirs, ours))
    for epoch in (0, 3, 4):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(other) == list(one)


@pytest.mark.parametrize("options", [{"data_seed": 7}, {"data_seed": 7, "replacement": True, "num_samples": 5}, {}])
def test_seeded_orders_are_the_same(options):
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


def test_what_skips():
    for count in range(5):
        batches = BatchSampler(SequentialSampler(range(10)), 3, False)
        one, other = (kind.SkipBatchSampler(batches, count) for kind in (theirs, ours))
        assert (list(other), len(other), other.total_length) == (list(one), len(one), one.total_length)
        one, other = (kind.SkipDataLoader(list(range(10)), count, batch_size=3) for kind in (theirs, ours))
        assert [each.tolist() for each in other] == [each.tolist() for each in one]
        assert len(other) == len(one)
        one, other = (kind.SkipDataLoader(list(range(10)), count, True, batch_size=3) for kind in (theirs, ours))
        assert [each.tolist() for each in other] == [each.tolist() for each in one]


def test_the_sampler_below():
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
def test_a_loader_shared_out_by_the_function(split, even, drop):
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
        # Headway's ranks stay in step: one without a batch in the last round gets one that weighs nothing.
        found = [each.tolist() for each in other if even or other.num_valid]
        assert found == [each.tolist() for each in one], (length, index)
        assert not isinstance(other, loaders.DataLoaderDispatcher)


def test_a_seedable_order_of_one_process():
    def make(kind, **options):
        torch.manual_seed(4)
        loader = DataLoader(range(9), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
        return kind.prepare_data_loader(loader, put_on_device=True, **options)

    one, other = make(theirs), make(loaders)
    assert [each.tolist() for each in other] == [each.tolist() for each in one]
    dispatched = make(loaders, dispatch_batches=True)
    assert sorted(row for each in dispatched for row in each.tolist()) == list(range(9))
