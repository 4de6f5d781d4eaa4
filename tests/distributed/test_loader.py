"""Prepared loaders on real gloo ranks, and with real worker processes."""

import os
import random

import datasets
import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler, get_worker_info

from headway import Accelerator
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from tests.distributed.ranks import run_ranks
from tests.unit.core.data.fakes import Numbers, Stream, join_real_rows, prepare, read_batches

# -------------------------------------------------------------------- real ranks


def prepare_on_this_rank(loader, **config):
    collectives = Collectives(process.current())
    return prepare(loader, collectives.rank, collectives.world_size, collectives, seed=5, **config)


def read_every_length():
    out = {}
    for n in range(0, 26, 5):
        for even_batches in (True, False):
            loader = DataLoader(Numbers(n), batch_size=3)
            out[n, even_batches] = read_batches(prepare_on_this_rank(loader, even_batches=even_batches))
            out[n, even_batches, "stream"] = read_batches(
                prepare_on_this_rank(DataLoader(Stream(n), batch_size=3), even_batches=even_batches)
            )
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sample_is_read_once(world_size):
    ranks = run_ranks(read_every_length, world_size)
    for key in ranks[0]:
        assert join_real_rows([each[key] for each in ranks]) == list(range(key[0]))


def read_with_default_settings():
    """Return this rank's batches of three epochs. Rank 0 alone iterates over an evaluation loader in between."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    loader, evaluated = accelerator.prepare(
        DataLoader(range(24), batch_size=3, shuffle=True), DataLoader(range(9), batch_size=3)
    )
    epochs = []
    for _ in range(3):
        torch.nn.functional.dropout(
            torch.ones(5 + accelerator.process_index)
        )  # each rank draws a different number of values
        epochs.append([batch.tolist() for batch in loader])
        if accelerator.is_main_process:
            list(evaluated)
    return epochs


def test_ranks_share_the_order_drawn_by_rank_zero():
    ranks = run_ranks(read_with_default_settings, 2)
    orders = [[row for pair in zip(*rounds) for batch in pair for row in batch] for rounds in zip(*ranks)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    torch.manual_seed(3)
    torch.nn.functional.dropout(torch.ones(5))  # what rank 0 draws before its first epoch
    plain = [row.item() for row in DataLoader(range(24), shuffle=True)]
    assert orders[0] == plain


class GlobalRandomSampler(Sampler):
    """Sampler that draws from the global generators of Python and torch."""

    def __len__(self):
        return 24

    def __iter__(self):
        order = list(range(24))
        random.shuffle(order)
        yield from (order[int(position)] for position in torch.randperm(24))


def read_with_different_generators():
    rank = process.current().rank
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    out = []
    for is_seedable in (True, False):
        own = SubsetRandomSampler(range(24), generator=torch.Generator().manual_seed(rank))
        for loader in (
            DataLoader(Numbers(24), batch_size=5, shuffle=True),
            DataLoader(Numbers(24), batch_size=5, sampler=GlobalRandomSampler()),
            DataLoader(Numbers(24), batch_size=5, sampler=own),
            DataLoader(Numbers(24), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(rank)),
        ):
            prepared = prepare_on_this_rank(loader, use_seedable_sampler=is_seedable)
            out += [read_batches(prepared), read_batches(prepared)]
    return out


def test_ranks_use_one_order_despite_different_random_states():
    for first, second in zip(*run_ranks(read_with_different_generators, 2), strict=True):
        rows = join_real_rows([first, second])
        assert sorted(rows) == list(range(24))
        assert rows != sorted(rows)


def read_own_shards():
    stream = datasets.Dataset.from_dict({"x": list(range(13))}).to_iterable_dataset(num_shards=5)
    loader = prepare_on_this_rank(DataLoader(stream.filter(lambda row: row["x"] > 5), batch_size=2))
    return [(batch["x"].tolist(), loader.valid_counts, loader.num_valid, loader.is_last) for batch in loader]


def test_rank_with_empty_shards_does_not_block_the_others():
    assert sorted(join_real_rows(run_ranks(read_own_shards, 2))) == list(range(6, 13))


def read_dispatched():
    out = []
    for loader in (DataLoader(Numbers(11), batch_size=2, shuffle=True), DataLoader(Stream(11), batch_size=2)):
        prepared = prepare_on_this_rank(loader, dispatch_batches=True)
        out += [read_batches(prepared), read_batches(prepared, 1), prepared.state_dict()]
    return out


def test_main_process_reads_for_all_ranks_with_dispatch_batches():
    ranks = run_ranks(read_dispatched, 2)
    for part in (0, 3):
        assert sorted(join_real_rows([each[part] for each in ranks])) == list(range(11))
    expected = {"epoch": 1, "consumed": 4, "source": {"order": "shuffled by seed and epoch"}}
    assert ranks[0][2] == ranks[1][2] == expected


def read_first_half(num_batches):
    loader = prepare_on_this_rank(DataLoader(Numbers(23), batch_size=2, shuffle=True, num_workers=1))
    return read_batches(loader, num_batches), loader.state_dict()


def read_rest(state):
    loader = prepare_on_this_rank(DataLoader(Numbers(23), batch_size=2, shuffle=True))
    loader.load_state_dict(state)
    return read_batches(loader)


def test_loader_resumes_on_another_number_of_ranks():
    whole = [
        row
        for rows, *_ in read_batches(prepare(DataLoader(Numbers(23), batch_size=2, shuffle=True), seed=5))
        for row in rows
    ]
    first_rows = run_ranks(read_first_half, 2, 2)
    rest = run_ranks(read_rest, 3, first_rows[0][1])
    assert join_real_rows([rows for rows, _ in first_rows]) + join_real_rows(rest) == whole


# -------------------------------------------------------------------- worker processes


class RandomRows(Dataset):
    """Dataset whose samples contain numbers from three random generators. Some samples draw more numbers than others."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
        for _ in range(index % 4):
            torch.rand(3), random.random(), numpy.random.rand()
        return torch.tensor([index, *drawn], dtype=torch.float64)


def read_random_rows(count=1, num_workers=1, state=None, batch_size=3, num_epochs=1, **settings):
    """Return for each epoch a dict from a sample's index to its random numbers."""
    epochs = []
    loaders = [
        prepare(
            DataLoader(RandomRows(17), batch_size=batch_size, shuffle=True, num_workers=num_workers, **settings),
            rank,
            count,
        )
        for rank in range(count)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    for _ in range(num_epochs):
        seen = {}
        for loader in loaders:
            for batch in loader:
                seen |= {int(row[0]): tuple(row[1:].tolist()) for row in batch[: loader.num_valid]}
        epochs.append(seen)
    return epochs


def test_augmentation_depends_only_on_seed_epoch_and_position():
    (first, second) = read_random_rows(num_epochs=2)
    assert len({numbers for epoch in (first, second) for numbers in epoch.values()}) == 34
    assert read_random_rows(num_workers=2) == [first]
    assert read_random_rows(count=2) == [first]
    assert read_random_rows(batch_size=4, num_workers=2, persistent_workers=True, num_epochs=2) == [first, second]
    (rest,) = read_random_rows(state={"epoch": 0, "consumed": 9}, num_workers=2)
    assert rest == {index: first[index] for index in rest}
    assert len(rest) == 8


def test_augmentation_of_unbatched_items_is_equal_for_any_number_of_workers():
    def numbers(num_workers):
        loader = prepare(DataLoader(RandomRows(6), batch_size=None, num_workers=num_workers))
        return [item.tolist() for item in loader]

    assert numbers(1) == numbers(2)


def test_workers_do_not_change_the_parents_random_state():
    before = torch.get_rng_state(), random.getstate()
    read_random_rows(num_workers=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class ProcessIds(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        assert type(info.dataset) is ProcessIds
        return os.getpid()


def test_persistent_workers_survive_epochs_and_breaks():
    loader = prepare(DataLoader(ProcessIds(), batch_size=1, num_workers=2, persistent_workers=True))
    first = {int(pid) for pid in loader}
    next(iter(loader))
    assert len(list(loader)) == 8
    assert {int(pid) for pid in loader} == first
    assert {int(pid) for pid in loader.skip(4)} == first
    assert len(first) == 2


class SplitStream(IterableDataset):
    """Stream that its workers split, as in torch's documentation."""

    def __init__(self, length):
        self.first, self.last = 0, length

    def __iter__(self):
        return iter(torch.arange(self.first, self.last))


def split_among_workers(worker_id):
    info = get_worker_info()
    whole = info.dataset
    size = -(-whole.last // info.num_workers)
    whole.first, whole.last = worker_id * size, min(whole.last, (worker_id + 1) * size)


@pytest.mark.parametrize("even_batches", [True, False])
def test_stream_split_among_workers_and_ranks(even_batches):
    def make():
        return DataLoader(SplitStream(23), batch_size=2, num_workers=2, worker_init_fn=split_among_workers)

    ranks = [read_batches(prepare(make(), rank, 2, even_batches=even_batches)) for rank in range(2)]
    assert sorted(join_real_rows(ranks)) == list(range(23))
    skipped = [read_batches(prepare(make(), rank, 2).skip(3)) for rank in range(2)]
    assert join_real_rows(skipped) == join_real_rows([batches[3:] for batches in ranks])
    loader = prepare(make(), 0, 2)
    read_batches(loader, 2)
    resumed = [prepare(make(), rank, 2) for rank in range(2)]
    for each in resumed:
        each.load_state_dict(loader.state_dict())
    assert join_real_rows([read_batches(each) for each in resumed]) == join_real_rows(
        [batches[2:] for batches in ranks]
    )


def test_unordered_batches_are_complete():
    loader = prepare(DataLoader(Numbers(11), batch_size=2, num_workers=2, in_order=False))
    batches = read_batches(loader)
    assert sorted(join_real_rows([batches])) == list(range(11))
    assert all(len(rows) == num_valid for rows, _, num_valid, _ in batches)
    assert [is_last for *_, is_last in batches] == [False] * 5 + [True]


def test_spawned_workers_read_each_row_once():
    loader = prepare(DataLoader(RandomRows(5), batch_size=2, num_workers=1, multiprocessing_context="spawn"))
    assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(5))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_stream_with_a_worker_resumes():
    def make():
        return prepare(DataLoader(Stream(20), batch_size=2, num_workers=1), use_stateful_dataloader=True)

    loader = make()
    first_rows = join_real_rows([read_batches(loader, 3)])
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert first_rows + join_real_rows([read_batches(resumed)]) == list(range(20))
