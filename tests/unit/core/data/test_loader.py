"""Test the prepared loader on one process, and on several ranks that are threads."""

import gc
import itertools
import json
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from headway.core.data.loader import PreparedLoader
from headway.errors import DataError
from tests.unit.core.data.fakes import Numbers, join_real_rows, prepare, read_batches, run_on_ranks


def read_rows(loader):
    return [batch.tolist() for batch in loader]


def read_on_ranks(count, make, num_batches=None, **settings):
    """Return the batches of each of `count` ranks. For indexed data, ranks need no communication."""
    return [read_batches(prepare(make(), rank, count, **settings), num_batches) for rank in range(count)]


# -------------------------------------------------------------------- class and settings


def test_prepared_loader_is_a_dataloader_with_the_users_settings():
    dataset = Numbers(10)
    source = DataLoader(dataset, batch_size=4, drop_last=True)
    loader = prepare(source)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert loader.batch_sampler is source.batch_sampler
    assert loader.sampler is source.sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (4, True, 0)
    assert loader.multiprocessing_context is None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing


def test_preparing_twice_gives_the_same_object():
    loader = prepare(DataLoader(Numbers(4)))
    assert prepare(loader) is loader


def test_unused_loader_is_garbage_collected():
    loader = prepare(DataLoader(Numbers(4)))
    list(loader)
    seen = weakref.ref(loader)
    del loader
    gc.collect()
    assert seen() is None


def test_dataset_is_never_copied():
    class Uncopyable(Numbers):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        __reduce_ex__ = None

    assert read_rows(prepare(DataLoader(Uncopyable(3), batch_size=2))) == [[0, 1], [2]]


# -------------------------------------------------------------------- one process


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 30), size=st.integers(1, 7), drop_last=st.booleans())
def test_one_process_reads_the_batches_of_a_plain_loader(n, size, drop_last):
    plain = DataLoader(Numbers(n), batch_size=size, drop_last=drop_last)
    loader = prepare(DataLoader(Numbers(n), batch_size=size, drop_last=drop_last))
    assert read_rows(loader) == read_rows(plain)
    assert len(loader) == len(plain)


def test_no_batch_is_fetched_ahead():
    dataset = Numbers(8)
    iterator = iter(prepare(DataLoader(dataset, batch_size=2)))
    next(iterator)
    assert dataset.fetched == [0, 1]


def test_reading_keeps_torchs_rng_state():
    before = torch.get_rng_state()
    list(prepare(DataLoader(Numbers(8), batch_size=2, shuffle=True)))
    assert torch.equal(torch.get_rng_state(), before)


def test_base_seed_of_workers_is_a_function_of_seed_and_epoch():
    def list_base_seeds(seed):
        loader = prepare(DataLoader(Numbers(2)), seed=seed)
        out = []
        for _ in range(2):
            list(loader)
            out.append(loader._feed.inner_loader.generator.initial_seed())
        return out

    assert list_base_seeds(1) == list_base_seeds(1)
    assert len({*list_base_seeds(1), *list_base_seeds(2)}) == 4


def test_current_batch_is_described():
    loader = prepare(DataLoader(Numbers(5), batch_size=2))
    seen = [(loader.is_last, loader.num_rows, loader.valid_counts, loader.num_valid) for _ in loader]
    assert seen == [(False, 2, (2,), 2), (False, 2, (2,), 2), (True, 1, (1,), 1)]


def test_mask_marks_repeated_rows():
    loader = prepare(DataLoader(Numbers(5), batch_size=4), rank=1, count=2)
    (batch,) = loader
    assert batch.tolist() == [4, 0, 1, 2]
    assert loader.mask.tolist() == [True, False, False, False]


def test_before_the_first_batch_its_properties_are_none():
    loader = prepare(DataLoader(Numbers(5), batch_size=4))
    assert (loader.is_last, loader.num_rows, loader.valid_counts, loader.num_valid, loader.mask) == (False, *[None] * 4)


# -------------------------------------------------------------------- several ranks


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(0, 50), count=st.integers(1, 5), size=st.integers(1, 6),
    is_shuffled=st.booleans(), drop_last=st.booleans(), even_batches=st.booleans(), split_batches=st.booleans(),
)  # fmt: skip
def test_real_row_counts_are_exact(n, count, size, is_shuffled, drop_last, even_batches, split_batches):
    if n == 0:
        is_shuffled = False  # torch's RandomSampler refuses an empty dataset
    batch_size = size * count if split_batches else size

    def make():
        return DataLoader(Numbers(n), batch_size=batch_size, shuffle=is_shuffled, drop_last=drop_last)

    alone = prepare(DataLoader(Numbers(n), batch_size=max(1, n), shuffle=is_shuffled))
    order = list(itertools.chain(*read_rows(alone)))
    ranks = read_on_ranks(count, make, even_batches=even_batches, split_batches=split_batches)
    kept = n - n % (size * count) if drop_last else n
    assert join_real_rows(ranks) == order[:kept]
    assert {len(batches) for batches in ranks} == {len(prepare(make(), 0, count, split_batches=split_batches))}
    assert all(batches[-1][-1] for batches in ranks if batches)


def test_length_is_that_of_the_sampler():
    def make():
        return DataLoader(Numbers(16), batch_size=4, sampler=SubsetRandomSampler(range(9)))

    assert sorted(join_real_rows(read_on_ranks(2, make))) == list(range(9))


def test_rank_fetches_only_its_own_samples():
    dataset = Numbers(16)
    list(prepare(DataLoader(dataset, batch_size=2), rank=1, count=2))
    assert dataset.fetched == [2, 3, 6, 7, 10, 11, 14, 15]


def test_total_batch_size_counts_all_ranks():
    assert prepare(DataLoader(Numbers(16), batch_size=4), 0, 2).total_batch_size == 8
    assert prepare(DataLoader(Numbers(16), batch_size=4), 0, 2, split_batches=True).total_batch_size == 4
    assert prepare(DataLoader(Numbers(16), batch_sampler=[[0], [1, 2]]), 0, 2).total_batch_size is None
    assert prepare(DataLoader(Numbers(16), batch_size=4)).total_dataset_length == 16


def test_even_batches_can_be_switched_between_passes():
    loader = prepare(DataLoader(Numbers(5), batch_size=4), rank=1, count=2)
    assert read_rows(loader) == [[4, 0, 1, 2]]
    loader.even_batches = False
    assert read_rows(loader) == [[4]]
    alone = prepare(DataLoader(Numbers(5), batch_size=4))
    alone.even_batches = True
    assert read_rows(alone) == [[0, 1, 2, 3], [4]]


# -------------------------------------------------------------------- batch samplers


def test_custom_batch_sampler_without_a_length_is_read():
    def batches():
        for size in (1, 3, 2, 4, 1):
            yield list(range(size))

    class Endless:
        def __iter__(self):
            return batches()

    def make():
        return DataLoader(Numbers(16), batch_sampler=Endless())

    assert join_real_rows(read_on_ranks(2, make)) == list(itertools.chain(*batches()))
    with pytest.raises(TypeError):
        len(prepare(make()))


def test_list_as_a_batch_sampler_is_left_unchanged():
    batches = [[0, 1], [2, 3], [4]]
    ranks = read_on_ranks(2, lambda: DataLoader(Numbers(5), batch_sampler=batches))
    assert join_real_rows(ranks) == [0, 1, 2, 3, 4]
    assert batches == [[0, 1], [2, 3], [4]]


def test_torchs_batch_sampler_has_a_pure_order():
    dataset = Numbers(10)
    by_hand = DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 4, True))
    assert read_rows(prepare(by_hand)) == read_rows(
        prepare(DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True))
    )


def test_batch_of_a_custom_batch_sampler_is_completed_to_its_size():
    class Mine(BatchSampler):
        pass

    ranks = read_on_ranks(2, lambda: DataLoader(Numbers(7), batch_sampler=Mine(SequentialSampler(range(7)), 3, False)))
    assert [batches[-1][0] for batches in ranks] == [[6, 0, 1], [0, 1, 2]]
    assert join_real_rows(ranks) == list(range(7))


# -------------------------------------------------------------------- unbatched


def make_items(n):
    return [torch.arange(row * 10, row * 10 + 1 + row % 3) for row in range(n)]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("even_batches", [True, False])
def test_unbatched_items_are_split_with_their_rows(n, even_batches):
    def run_rank(rank, collectives):
        return read_batches(
            prepare(DataLoader(make_items(n), batch_size=None), rank, 3, collectives, even_batches=even_batches)
        )

    ranks = run_on_ranks(3, run_rank)
    assert join_real_rows(ranks) == [row for item in make_items(n) for row in item.tolist()]


def test_one_process_reads_items_without_rows():
    loader = prepare(DataLoader(["a", "b"], batch_size=None))
    assert [(item, loader.num_rows, loader.valid_counts) for item in loader] == [("a", None, None), ("b", None, None)]


def test_several_processes_need_items_with_rows():
    def run_rank(rank, collectives):
        return list(prepare(DataLoader(["a", "b"], batch_size=None), rank, 2, collectives))

    with pytest.raises(DataError, match=r"rank 0 read contains no tensor .* tensors of shape \[rows, ...\]"):
        run_on_ranks(2, run_rank)


# -------------------------------------------------------------------- epochs


def test_epochs_differ_and_can_be_set():
    loader = prepare(DataLoader(Numbers(30), batch_size=30, shuffle=True))
    first, second = read_rows(loader), read_rows(loader)
    assert first != second
    loader.set_epoch(0)
    assert read_rows(loader) == first
    assert read_rows(loader) == second
    assert loader.epoch == 2


def test_break_does_not_repeat_the_shuffle():
    loader = prepare(DataLoader(Numbers(30), batch_size=10, shuffle=True))
    first = next(iter(loader)).tolist()
    second = next(iter(loader)).tolist()
    assert first != second
    assert loader.epoch == 1


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_generator_of_a_sampler_or_stream_continues_after_a_break_and_a_resume(kind):
    def build():
        generator = torch.Generator().manual_seed(3)
        if kind == "stream":
            return prepare(DataLoader(DrawnStream(generator), batch_size=2))
        dataset = Numbers(8)
        return prepare(DataLoader(dataset, batch_size=2, sampler=RandomSampler(dataset, generator=generator)))

    whole = build()
    read_rows(whole)
    next(iter(whole))
    state = json.loads(json.dumps(whole.checkpoint_state()))
    expected = [read_rows(whole), read_rows(whole)]
    resumed = build()
    resumed.load_state_dict(state)
    assert [read_rows(resumed), read_rows(resumed)] == expected
    assert expected[0] != expected[1]


class DrawnStream(IterableDataset):
    """Stream of numbers from a generator that is an attribute of the dataset."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).tolist())


def test_set_epoch_reaches_sampler_and_dataset():
    class Told:
        """Base class that records the epochs it is given."""

        def set_epoch(self, epoch):
            self.epochs = [*getattr(self, "epochs", []), epoch]

    class Dataset(Told, Numbers):
        pass

    class OwnSampler(Told, SequentialSampler):
        pass

    class OwnBatches(Told, BatchSampler):
        pass

    dataset = Dataset(4)
    batches = OwnBatches(OwnSampler(dataset), 2, False)
    loader = prepare(DataLoader(dataset, batch_sampler=batches))
    loader.set_epoch(5)
    list(loader), list(loader)
    assert dataset.epochs == batches.epochs == batches.sampler.epochs == [5, 5, 6]


# -------------------------------------------------------------------- active loaders


def test_loader_is_active_during_its_iteration():
    active = []
    outer = prepare(DataLoader(Numbers(4), batch_size=2), active=active)
    inner = prepare(DataLoader(Numbers(2), batch_size=2), active=active)
    for _ in outer:
        assert active == [outer]
        for _ in inner:
            assert active == [outer, inner]
        assert active == [outer]
    assert active == []


def test_break_closes_the_inner_loader_only():
    active = []
    outer = prepare(DataLoader(Numbers(4), batch_size=2), active=active)
    inner = prepare(DataLoader(Numbers(4), batch_size=2), active=active)
    last = []
    for _ in outer:
        for _ in inner:
            break
        assert active == [outer]
        last.append(active[-1].is_last)
    assert last == [False, True]


def test_error_closes_the_loader():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("no such sample")
            return super().__getitem__(index)

    active = []
    loader = prepare(DataLoader(Broken(4), batch_size=2), active=active)
    with pytest.raises(KeyError, match="no such sample"):
        list(loader)
    assert active == []


# -------------------------------------------------------------------- resuming


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 40), before=st.integers(1, 3), after=st.integers(1, 3), size=st.integers(1, 5),
    num_batches=st.integers(1, 6), is_custom=st.booleans(),
)  # fmt: skip
def test_run_resumes_on_any_number_of_ranks(n, before, after, size, num_batches, is_custom):
    def make():
        dataset = Numbers(n)
        sampler = SubsetRandomSampler(range(n), generator=torch.Generator().manual_seed(3)) if is_custom else None
        return DataLoader(dataset, batch_size=size, shuffle=not is_custom, sampler=sampler)

    def read_one_epoch(loader):
        list(loader)  # one epoch before the save
        return loader

    whole = [row for rows in read_rows(read_one_epoch(prepare(make()))) for row in rows]
    loaders = [read_one_epoch(prepare(make(), rank, before)) for rank in range(before)]
    begun = join_real_rows([read_batches(loader, min(num_batches, len(loader))) for loader in loaders])
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    assert (states[0]["epoch"], states[0]["consumed"]) == (1, len(begun))

    resumed = [prepare(make(), rank, after) for rank in range(after)]
    for loader in resumed:
        loader.load_state_dict(states[0])
    rest = join_real_rows([read_batches(loader) for loader in resumed])
    assert begun + rest == whole
    following = [row for rows in read_rows(read_resumed_epoch(make, states[0])) for row in rows]
    assert join_real_rows([read_batches(loader) for loader in resumed]) == following


def read_resumed_epoch(make, state):
    loader = prepare(make())
    loader.load_state_dict(state)
    list(loader)
    return loader


def test_state_counts_yielded_rows_and_resuming_fetches_none_of_them():
    dataset = Numbers(20)
    loader = prepare(DataLoader(dataset, batch_size=4))
    read_batches(loader, 2)
    state = loader.state_dict()
    assert state == {"epoch": 0, "consumed": 8, "source": {"order": "in the order of the data"}}
    dataset = Numbers(20)
    loader = prepare(DataLoader(dataset, batch_size=4))
    loader.load_state_dict(state)
    assert loader.num_consumed == 8
    list(loader)
    assert dataset.fetched == list(range(8, 20))


def test_state_from_the_last_batch_gives_an_empty_rest_before_the_next_epoch():
    loader = prepare(DataLoader(Numbers(4), batch_size=2, shuffle=True))
    states = [loader.state_dict() for _ in loader]
    second = read_rows(loader)
    resumed = prepare(DataLoader(Numbers(4), batch_size=2, shuffle=True))
    resumed.load_state_dict(states[-1])
    assert read_rows(resumed) == []
    assert read_rows(resumed) == second


def test_loaded_position_survives_set_epoch_to_the_same_epoch():
    loader = prepare(DataLoader(Numbers(8), batch_size=2))
    loader.load_state_dict({"epoch": 3, "consumed": 4})
    loader.set_epoch(3)
    assert read_rows(loader) == [[4, 5], [6, 7]]


def test_resuming_after_an_epoch_does_not_repeat_it():
    loader = prepare(DataLoader(Numbers(12), batch_size=4, shuffle=True))
    first = read_rows(loader)
    state = loader.state_dict()
    second = read_rows(loader)
    resumed = prepare(DataLoader(Numbers(12), batch_size=4, shuffle=True))
    resumed.load_state_dict(state)
    assert read_rows(resumed) == second != first


def test_custom_batch_sampler_resumes():
    batches = [[0], [1, 2, 3], [4, 5], [6, 7, 8], [9]]

    def make():
        return DataLoader(Numbers(10), batch_sampler=batches)

    loaders = [prepare(make(), rank, 2) for rank in range(2)]
    begun = join_real_rows([read_batches(loader, 1) for loader in loaders])
    resumed = [prepare(make(), rank, 3) for rank in range(3)]
    for loader in resumed:
        loader.load_state_dict(loaders[0].state_dict())
    assert begun + join_real_rows([read_batches(loader) for loader in resumed]) == list(range(10))


# -------------------------------------------------------------------- device


def test_batches_and_mask_are_moved():
    loader = prepare(DataLoader(Numbers(3), batch_size=2), device=torch.device("meta"))
    batch = next(iter(loader))
    assert batch.device.type == "meta"
    assert loader.mask.device.type == "meta"


def test_mapping_subclasses_are_moved():
    from collections import OrderedDict, defaultdict

    for kind in (OrderedDict, lambda items: defaultdict(list, items)):
        loader = prepare(
            DataLoader(Numbers(2), batch_size=2, collate_fn=lambda rows, kind=kind: kind({"x": torch.stack(rows)})),
            device=torch.device("meta"),
        )
        (batch,) = loader
        assert batch["x"].device.type == "meta"


def test_subsets_are_read():
    loader = prepare(DataLoader(Subset(Numbers(10), [3, 5, 7]), batch_size=2))
    assert read_rows(loader) == [[3, 5], [7]]


def test_view_has_the_same_class():
    assert type(prepare(DataLoader(Numbers(3))).skip(1)) is PreparedLoader
