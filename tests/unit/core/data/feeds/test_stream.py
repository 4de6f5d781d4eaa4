"""Test iterable datasets: read by every rank, or by shards, resumed, skipped, and with stateful loaders."""

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from headway.core.data.feeds.stream import is_shardable
from headway.core.data.feeds.stream_collate import StreamCollate
from headway.core.data.sampling.shard import SampleSplit
from headway.errors import DataError, HeadwayWarning
from tests.unit.core.data.fakes import SizedStream, Stream, join_real_rows, prepare, read_batches, run_on_ranks


def read_on_ranks(count, make, num_batches=None, state=None, **config):
    """Return the batches of each rank and the loaders."""
    loaders = [prepare(make(), rank, count, **config) for rank in range(count)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return [read_batches(loader, num_batches) for loader in loaders], loaders


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(0, 50), count=st.integers(1, 5), size=st.integers(1, 6),
    drop_last=st.booleans(), even_batches=st.booleans(), split_batches=st.booleans(),
)  # fmt: skip
def test_real_row_counts_are_exact(n, count, size, drop_last, even_batches, split_batches):
    batch_size = size * count if split_batches else size
    ranks, loaders = read_on_ranks(
        count,
        lambda: DataLoader(SizedStream(n), batch_size=batch_size, drop_last=drop_last),
        even_batches=even_batches,
        split_batches=split_batches,
    )
    assert join_real_rows(ranks) == list(range(n - n % (size * count) if drop_last else n))
    assert {len(batches) for batches in ranks} == {len(loaders[0])}
    for batches in ranks:
        assert [is_last for *_, is_last in batches] == [False] * (len(batches) - 1) + [True] * bool(batches)
        if even_batches and count > 1:
            assert all(len(rows) == size for rows, *_ in batches)


def test_last_round_is_completed_from_the_start_of_the_stream():
    ranks, _ = read_on_ranks(2, lambda: DataLoader(Stream(7), batch_size=2))
    assert [rows for rows, *_ in ranks[1]] == [[2, 3], [6, 0]]


def test_rank_collates_only_its_own_rows():
    collated = []

    def collate(rows):
        collated.extend(rows)
        return torch.stack(rows)

    list(prepare(DataLoader(Stream(16), batch_size=2, collate_fn=collate), rank=1, count=2))
    assert [int(row) for row in collated] == [2, 3, 6, 7, 10, 11, 14, 15]


def test_stream_without_a_length_gives_a_loader_without_one():
    loader = prepare(DataLoader(Stream(7), batch_size=2))
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == 4


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 40), before=st.integers(1, 3), after=st.integers(1, 3), size=st.integers(1, 5),
    num_batches=st.integers(1, 5),
)  # fmt: skip
def test_stream_resumes_on_any_number_of_ranks(n, before, after, size, num_batches):
    def make():
        return DataLoader(SizedStream(n), batch_size=size)

    num_batches = min(num_batches, len(prepare(make(), 0, before)))
    ranks, loaders = read_on_ranks(before, make, num_batches)
    begun, state = join_real_rows(ranks), loaders[0].state_dict()
    assert all(loader.state_dict() == state for loader in loaders)
    ranks, loaders = read_on_ranks(after, make, state=state)
    assert begun + join_real_rows(ranks) == list(range(n))
    assert join_real_rows([read_batches(loader) for loader in loaders]) == list(range(n))


def test_resuming_twice_is_exact():
    """The second save is in a run whose rounds do not begin at a multiple of their size."""
    ranks, loaders = read_on_ranks(1, lambda: DataLoader(Stream(40), batch_size=3), 2)
    out, state = join_real_rows(ranks), loaders[0].state_dict()
    for num_batches in (1, 2, None):
        ranks, loaders = read_on_ranks(2, lambda: DataLoader(Stream(40), batch_size=4), num_batches, state)
        out, state = out + join_real_rows(ranks), loaders[0].state_dict()
    assert out == list(range(40))


def test_set_epoch_discards_the_loaded_position():
    _, loaders = read_on_ranks(1, lambda: DataLoader(Stream(8), batch_size=2), 2)
    state = loaders[0].state_dict()
    loader = prepare(DataLoader(Stream(8), batch_size=2))
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert join_real_rows([read_batches(loader)]) == list(range(8))


class Shuffled(IterableDataset):
    """Stream shuffled by its own generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        return iter(torch.randperm(20, generator=self.generator))


def test_generator_of_a_stream_is_synchronized_and_saved():
    def run_rank(rank, collectives, state=None, num_batches=None):
        loader = prepare(DataLoader(Shuffled(rank), batch_size=2), rank, 2, collectives)
        if state is not None:
            loader.load_state_dict(state)
            return read_batches(loader)
        return read_batches(loader), read_batches(loader, 2), loader.state_dict()

    whole, begun, states = zip(*run_on_ranks(2, run_rank))
    assert sorted(join_real_rows(whole)) == list(range(20))
    rest = run_on_ranks(2, lambda rank, c: run_rank(rank + 0, c, states[0]))
    assert sorted(join_real_rows(begun) + join_real_rows(rest)) == list(range(20))
    assert join_real_rows(begun) + join_real_rows(rest) != join_real_rows(whole)


def test_skipped_rounds_are_read_but_not_collated():
    collated = []

    def collate(rows):
        collated.extend(map(int, rows))
        return torch.stack(rows)

    stream = Stream(12)
    loader = prepare(DataLoader(stream, batch_size=2, collate_fn=collate)).skip(4)
    assert join_real_rows([read_batches(loader)]) == [8, 9, 10, 11]
    assert collated == [8, 9, 10, 11]
    assert loader.state_dict() == {"epoch": 1, "consumed": 0}


def test_skipping_counts_samples_of_all_ranks():
    loader = prepare(DataLoader(Stream(12), batch_size=2), 0, 2).skip(2)
    read_batches(loader, 1)
    assert loader.num_consumed == 12


def test_unbatched_items_are_split_with_their_rows():
    class Items(IterableDataset):
        def __iter__(self):
            return (torch.arange(row * 10, row * 10 + 1 + row % 3) for row in range(5))

    for even_batches in (True, False):
        ranks, _ = read_on_ranks(3, lambda: DataLoader(Items(), batch_size=None), even_batches=even_batches)
        assert join_real_rows(ranks) == [row for item in Items() for row in item.tolist()]


def test_unbatched_items_without_rows_need_one_process():
    class Words(IterableDataset):
        def __iter__(self):
            return iter(["a", "b", "c"])

    loader = prepare(DataLoader(Words(), batch_size=None))
    assert [(item, loader.num_rows, loader.valid_counts) for item in loader] == [(c, None, None) for c in "abc"]
    with pytest.raises(DataError, match="an item of type str contains no tensor"):
        list(prepare(DataLoader(Words(), batch_size=None), 0, 2))


def test_collate_counts_rows_after_collating():
    collate = StreamCollate(torch.tensor, SampleSplit(1, 2, even_batches=False), (1,), is_batched=False)
    assert collate([[1, 2, 3], [4, 5]]).rank_batches[0].valid_counts == (3, 2)


# -------------------------------------------------------------------- Hugging Face datasets


def make_sharded_stream(n, num_shards):
    return datasets.Dataset.from_dict({"x": list(range(n))}).to_iterable_dataset(num_shards=num_shards)


def replace_rows_by_values(ranks):
    """Return the batches of each rank with the list in column "x" in place of the rows."""
    return [[(rows["x"].tolist(), *rest) for rows, *rest in batches] for batches in ranks]


@pytest.mark.parametrize("num_rows", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_own_shards_agree_on_every_round(num_rows, even_batches, count):
    def run_rank(rank, collectives):
        loader = DataLoader(make_sharded_stream(12, 4).filter(lambda row: row["x"] < num_rows), batch_size=2)
        return read_batches(prepare(loader, rank, count, collectives, even_batches=even_batches))

    ranks = replace_rows_by_values(run_on_ranks(count, run_rank))
    assert sorted(join_real_rows(ranks)) == list(range(num_rows))
    assert all(rows for batches in ranks for rows, *_ in batches)


def test_own_shards_with_drop_last_end_with_the_first_rank_to_end():
    def run_rank(rank, collectives):
        loader = DataLoader(make_sharded_stream(12, 4).filter(lambda row: row["x"] < 8), batch_size=2, drop_last=True)
        return read_batches(prepare(loader, rank, 2, collectives))

    assert sorted(join_real_rows(replace_rows_by_values(run_on_ranks(2, run_rank)))) == [0, 1, 6, 7]


def test_batch_changed_by_the_loop_can_still_be_a_filler():
    def run_rank(rank, collectives):
        loader = prepare(
            DataLoader(make_sharded_stream(12, 4).filter(lambda row: row["x"] < 8), batch_size=2), rank, 2, collectives
        )
        return [batch.pop("x").tolist() for batch in loader]

    assert run_on_ranks(2, run_rank) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [6, 7], [6, 7]]]


def test_own_shards_resume_and_skip():
    def run_rank(rank, collectives, num_batches=None, state=None, num_skipped_steps=0):
        loader = prepare(DataLoader(make_sharded_stream(12, 4), batch_size=2), rank, 2, collectives)
        if state is not None:
            loader.load_state_dict(state)
        if num_skipped_steps:
            loader = loader.skip(num_skipped_steps)
        return read_batches(loader, num_batches), loader.state_dict(), loader.num_consumed

    begun = run_on_ranks(2, lambda rank, c: run_rank(rank, c, num_batches=1))
    state = begun[0][1]
    assert all(each[1] == state for each in begun)
    rest = run_on_ranks(2, lambda rank, c: run_rank(rank, c, state=state))
    first = join_real_rows(replace_rows_by_values([each[0] for each in begun]))
    assert sorted(first + join_real_rows(replace_rows_by_values([each[0] for each in rest]))) == list(range(12))
    skipped = run_on_ranks(2, lambda rank, c: run_rank(rank, c, num_skipped_steps=1, num_batches=1))
    assert [each[2] for each in skipped] == [8, 8]
    assert join_real_rows(replace_rows_by_values([each[0] for each in skipped])) == [2, 3, 8, 9]


def test_resuming_own_shards_on_other_ranks_warns_that_it_is_not_exact():
    def run_rank(rank, collectives):
        loader = prepare(DataLoader(make_sharded_stream(12, 4), batch_size=2), rank, 2, collectives)
        loader.load_state_dict({"epoch": 0, "consumed": 6, "source": {"num_rounds": 1, "round_size": 6}})
        return read_batches(loader)

    with pytest.raises(HeadwayWarning, match=r"after 6 samples with steps of 4 samples instead of 6\. Each rank"):
        run_on_ranks(2, run_rank)


def test_epoch_reaches_the_shards():
    def run_rank(rank, collectives):
        loader = prepare(
            DataLoader(make_sharded_stream(40, 4).shuffle(seed=1, buffer_size=20), batch_size=4), rank, 2, collectives
        )
        return [read_values(loader) for _ in range(2)]

    def read_values(loader):
        return [value for batch in loader for value in batch["x"].tolist()]

    for first, second in run_on_ranks(2, run_rank):
        assert sorted(first) == sorted(second)
        assert first != second


def test_workers_share_a_seed_for_one_stream_and_not_for_own_shards():
    def run_rank(rank, collectives, make):
        loader = prepare(DataLoader(make(), batch_size=2), rank, 2, collectives)
        list(loader)
        return loader._feed.inner_loader.generator.initial_seed()

    assert len(set(run_on_ranks(2, lambda rank, c: run_rank(rank, c, lambda: Stream(4))))) == 1
    assert len(set(run_on_ranks(2, lambda rank, c: run_rank(rank, c, lambda: make_sharded_stream(8, 4))))) == 2


def test_is_shardable_needs_a_divisible_number_of_shards():
    assert is_shardable(make_sharded_stream(8, 2), 2)
    assert not is_shardable(make_sharded_stream(8, 2), 3)
    assert not is_shardable(make_sharded_stream(8, 2), 1)
    assert not is_shardable(Stream(8), 2)


def test_few_shards_are_read_by_every_rank():
    loaders = [prepare(DataLoader(make_sharded_stream(7, 2), batch_size=1), rank, 3) for rank in range(3)]
    assert join_real_rows(replace_rows_by_values([read_batches(loader) for loader in loaders])) == list(range(7))


def test_map_style_datasets_with_a_torch_format_are_read_once():
    data = datasets.Dataset.from_dict({"x": list(range(9))}).with_format("torch")
    loaders = [prepare(DataLoader(data, batch_size=2, shuffle=True), rank, 2) for rank in range(2)]
    assert sorted(join_real_rows(replace_rows_by_values([read_batches(loader) for loader in loaders]))) == list(
        range(9)
    )


# -------------------------------------------------------------------- stateful loaders


class Remembering(IterableDataset):
    """Stream that can resume from its state, and counts the samples it reads."""

    def __init__(self, length):
        self.length = length
        self.next = 0
        self.num_read = 0

    def __iter__(self):
        while self.next < self.length:
            self.next += 1
            self.num_read += 1
            yield torch.tensor(self.next - 1)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader_resumes_from_the_streams_own_state():
    loader = prepare(DataLoader(Remembering(20), batch_size=2), use_stateful_dataloader=True)
    begun = join_real_rows([read_batches(loader, 3)])
    state = loader.state_dict()
    stream = Remembering(20)
    resumed = prepare(DataLoader(stream, batch_size=2), use_stateful_dataloader=True)
    resumed.load_state_dict(state)
    assert begun + join_real_rows([read_batches(resumed)]) == list(range(20))
    assert stream.num_read == 14
    assert join_real_rows([read_batches(resumed)]) == list(range(20))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader_with_other_rounds_reads_again():
    loader = prepare(DataLoader(Stream(20), batch_size=2), use_stateful_dataloader=True)
    begun = join_real_rows([read_batches(loader, 3)])
    loaders = [prepare(DataLoader(Stream(20), batch_size=2), rank, 2, use_stateful_dataloader=True) for rank in (0, 1)]
    for each in loaders:
        each.load_state_dict(loader.state_dict())
    assert begun + join_real_rows([read_batches(each) for each in loaders]) == list(range(20))


def test_row_counts_survive_pinned_memory():
    """Pinning rebuilds a batch's containers. Some versions of torch turn tuples into lists."""
    feed = prepare(DataLoader(Stream(3), batch_size=2, pin_memory=True), 1, 2)._feed
    piece = feed._collate([torch.tensor(row) for row in range(3)])
    pinned = pin_memory(piece._replace(batches=["batch"]))
    pinned = pinned._replace(
        rank_batches=[each._replace(valid_counts=list(each.valid_counts)) for each in pinned.rank_batches]
    )
    ((_, share),) = feed._deliver_batches(iter([(pinned, False)]))
    assert (share.valid_counts, share.is_last) == ((2, 1), False)


@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}, {"dispatch_batches": True, "even_batches": False}])
def test_collate_function_may_change_samples(config):
    """Fillers are samples of earlier batches, so they must be complete."""

    class Rows(IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.tensor(row), "label": row} for row in range(9)])

    def collate(rows):
        labels = [row.pop("label") for row in rows]
        return torch.tensor(labels)

    def run_rank(rank, collectives):
        return read_batches(
            prepare(DataLoader(Rows(), batch_size=4, collate_fn=collate), rank, 2, collectives, **config)
        )

    assert join_real_rows(run_on_ranks(2, run_rank)) == list(range(9))


def test_fewer_samples_than_a_round_are_complete_each_time():
    class Rows(IterableDataset):
        def __iter__(self):
            return iter([{"label": 5}])

    loader = DataLoader(Rows(), batch_size=3, collate_fn=lambda rows: torch.tensor([row.pop("label") for row in rows]))
    assert [batch.tolist() for batch in prepare(loader, 0, 2)] == [[5, 5, 5]]
