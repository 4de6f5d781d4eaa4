"""Test the checks of `prepare` for loaders, and the settings that reach the loader that reads."""

import builtins

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from headway import DataLoaderConfiguration
from headway.core.data.loader_checks import check_loader
from headway.core.data.sampling.shard import ShardIndex
from headway.errors import DataError, OptionalDependencyMissing
from tests.unit.core.data.fakes import Numbers, Stream, prepare, run_on_ranks


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(10), batch_size=5),
        lambda: DataLoader(Stream(10), batch_size=5),
        lambda: DataLoader(Numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 5, False)),
    ],
)
def test_batch_that_cannot_be_split_is_refused(make):
    with pytest.raises(DataError, match=r"each batch of 5 samples among 2 processes.*multiple of 2 \(such as 6\)"):
        prepare(make(), 0, 2, split_batches=True)
    prepare(make(), 0, 1, split_batches=True)


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_split_batches_without_batches_is_refused(kind):
    with pytest.raises(DataError, match="split_batches=True with batch_size=None"):
        prepare(DataLoader(kind(4), batch_size=None), 0, 2, split_batches=True)


def test_distributed_sampler_is_refused():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    with pytest.raises(DataError, match=r"DistributedSampler already picks one of 2 parts.*shuffle="):
        prepare(DataLoader(Numbers(8), sampler=sampler), 0, 2)
    alone = DistributedSampler(Numbers(8), num_replicas=1, rank=0, shuffle=False)
    assert len(list(prepare(DataLoader(Numbers(8), sampler=alone)))) == 8


def test_data_of_one_rank_and_data_pipes_are_refused():
    rows = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=4)
    split = split_dataset_by_node(rows, rank=0, world_size=2)
    with pytest.raises(DataError, match="already contains only one rank's part"):
        prepare(DataLoader(split), 0, 2)
    with pytest.raises(DataError, match="data pipes, which shard themselves"):
        prepare(DataLoader(IterableWrapper(range(8))), 0, 2)
    with pytest.raises(
        DataError, match="already contains only one rank's part"
    ):  # all ranks read the same data (tensor parallelism)
        check_loader(DataLoader(split), ShardIndex(0, 1), DataLoaderConfiguration(), is_shared=True)


def test_different_lengths_on_ranks_are_refused():
    def run_rank(rank, collectives):
        prepare(DataLoader(Numbers(8 + rank)), rank, 2, collectives)

    with pytest.raises(DataError, match=r"different lengths \(samples or batches: \[8, 9\]\)"):
        run_on_ranks(2, run_rank)


def test_loader_with_its_own_iter_is_refused():
    class Mine(DataLoader):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match=r"Mine overrides DataLoader.__iter__"):
        prepare(Mine(Numbers(4)))


class FiltersBatches(DataLoader):
    """Changes batches in the main process on request, as torch_geometric's loaders with filter_per_worker=False."""

    filter_per_worker = False

    def _get_iterator(self):
        iterator = super()._get_iterator()
        return iterator if self.filter_per_worker else map(torch.neg, iterator)


class ReplacesIterator(DataLoader):
    def _get_iterator(self):
        return iter([torch.tensor([7])])


class AsksIterator(DataLoader):
    def _get_iterator(self):
        iterator = super()._get_iterator()
        iterator._sampler_iter
        return iterator


@pytest.mark.parametrize("kind", [FiltersBatches, ReplacesIterator, AsksIterator])
def test_loader_with_its_own_iterator_is_refused(kind):
    with pytest.raises(DataError, match=rf"{kind.__name__} overrides DataLoader._get_iterator.*filter_per_worker=True"):
        prepare(kind(Numbers(4), num_workers=1))


def test_loader_whose_iterator_is_unchanged_is_accepted():
    class InWorkers(FiltersBatches):
        filter_per_worker = True

    assert [batch.tolist() for batch in prepare(InWorkers(Numbers(4), batch_size=2))] == [[0, 1], [2, 3]]


def test_subclass_with_its_own_collate_is_accepted():
    class Mine(DataLoader):
        def __init__(self, dataset):
            super().__init__(dataset, batch_size=2, collate_fn=list)

    assert [len(batch) for batch in prepare(Mine(Numbers(4)))] == [2, 2]


def test_missing_package_is_named(monkeypatch):
    whole = builtins.__import__
    import importlib

    def fail_for_torchdata(name, *args):
        if name.startswith("torchdata"):
            raise ImportError(name)
        return whole(name, *args)

    monkeypatch.setattr(importlib, "import_module", fail_for_torchdata)
    with pytest.raises(OptionalDependencyMissing, match=r"headway\[stateful\]"):
        prepare(DataLoader(Numbers(4)), use_stateful_dataloader=True)


def init_worker(worker_id):
    pass


def test_all_settings_reach_the_loader_that_reads():
    source = DataLoader(
        Numbers(8), batch_size=2, num_workers=1, collate_fn=list, pin_memory=True, timeout=9, worker_init_fn=init_worker,
        multiprocessing_context="spawn", prefetch_factor=3, persistent_workers=True, in_order=False,
    )  # fmt: skip
    inner_loader = prepare(source)._feed.inner_loader
    for name in (
        "dataset", "num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn",
        "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order",
    ):  # fmt: skip
        assert getattr(inner_loader, name) == getattr(source, name), name


def test_in_order_false_needs_equal_rounds():
    def make(n, **settings):
        return DataLoader(Numbers(n), batch_size=2, num_workers=1, in_order=False, **settings)

    with pytest.raises(DataError, match=r"in_order=False.*drop_last=True or in_order=True"):
        next(iter(prepare(make(7), 0, 2)))
    with pytest.raises(DataError, match="in_order=False"):
        next(iter(prepare(DataLoader(Numbers(7), batch_sampler=[[0], [1]], num_workers=1, in_order=False), 0, 2)))


def test_users_loader_is_left_unchanged():
    source = DataLoader(Numbers(6), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected = source.generator.get_state()
    prepare(source)
    assert torch.equal(source.generator.get_state(), expected)
    assert source.__class__ is DataLoader
