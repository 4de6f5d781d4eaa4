"""Test `gather_for_metrics` with threads as ranks: each sample once and in order, for all lengths and world sizes."""

import collections

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from headway.core.runtime.collectives.tree import list_tensors, map_tensors
from headway.core.training.metrics import gather_for_metrics
from headway.errors import MetricError
from tests.unit.core.data.fakes import Numbers, SizedStream, Stream, ThreadCollectives, prepare, run_on_ranks

Pair = collections.namedtuple("Pair", "left right")


class TensorCollectives(ThreadCollectives):
    """Collectives among threads that can also gather tensors."""

    def gather(self, tree):
        ranks = [list(list_tensors(row)) for row in self.gather_objects(tree)]
        joined = iter([torch.cat(column) for column in zip(*ranks, strict=True)])
        return map_tensors(lambda _: next(joined), tree)


def run_with_tensor_collectives(count, function):
    return run_on_ranks(count, lambda rank, lent: function(rank, TensorCollectives(rank, lent.meeting)))


def gather_epoch(make, count, values=lambda batch: batch, skip=0, use_gather_object=False, **config):
    """Return, for each rank, the list of gathered values of an epoch."""

    def run_rank(rank, collectives):
        loader = prepare(make(), rank, count, collectives, **config)
        loader = loader.skip(skip) if skip else loader
        return [gather_for_metrics(values(batch), loader, collectives, use_gather_object) for batch in loader]

    return run_with_tensor_collectives(count, run_rank)


def flatten_batches(batches):
    return [int(value) for batch in batches for value in batch]


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_each_sample_is_gathered_once_for_every_length(count, even_batches):
    for n in range(0, 51, (1, 1, 2, 3, 3)[count - 1]):
        for size in (4,) if n % 5 else (1, 3, 4, 7):
            ranks = gather_epoch(lambda: DataLoader(Numbers(n), batch_size=size), count, even_batches=even_batches)
            assert all(flatten_batches(seen) == list(range(n)) for seen in ranks), (n, size)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
def test_each_sample_of_a_stream_is_gathered_once(count, kind):
    for n in range(0, 51, 3):
        for even_batches in (True, False):
            ranks = gather_epoch(lambda: DataLoader(kind(n), batch_size=4), count, even_batches=even_batches)
            assert all(sorted(flatten_batches(seen)) == list(range(n)) for seen in ranks), n
            assert all(flatten_batches(seen) == flatten_batches(ranks[0]) for seen in ranks)


@pytest.mark.parametrize("count", [2, 4])
def test_each_sample_of_split_batches_is_gathered_once(count):
    for n in range(0, 51, count // 2):
        ranks = gather_epoch(lambda: DataLoader(Numbers(n), batch_size=8), count, split_batches=True)
        assert all(flatten_batches(seen) == list(range(n)) for seen in ranks), n


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_dispatched_sample_is_gathered_once(count):
    for n in range(0, 51, 7):
        ranks = gather_epoch(lambda: DataLoader(Numbers(n), batch_size=4), count, dispatch_batches=True)
        assert all(sorted(flatten_batches(seen)) == list(range(n)) for seen in ranks), n


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_shuffled_sample_is_gathered_once(count):
    for n in (1, 17, 50):
        ranks = gather_epoch(lambda: DataLoader(Numbers(n), batch_size=4, shuffle=True), count)
        assert sorted(flatten_batches(ranks[0])) == list(range(n))
        assert all(flatten_batches(seen) == flatten_batches(ranks[0]) for seen in ranks)


def make_random_sampler(indices):
    return SubsetRandomSampler(indices, generator=torch.Generator())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_metrics_cover_the_samples_of_a_sampler_shorter_than_its_dataset(count):
    """Accelerate uses the length of the dataset: 9 of 16 samples became 12.

    The sampler has its own generator, because ranks are threads here and would share the global one.
    """
    for n in (1, 9, 10):
        expected = list(range(3, 3 + n))
        ranks = gather_epoch(
            lambda: DataLoader(Numbers(16), batch_size=4, sampler=make_random_sampler(expected)), count
        )
        assert all(sorted(flatten_batches(seen)) == expected for seen in ranks)
        ranks = gather_epoch(lambda: DataLoader(Numbers(16), batch_sampler=BatchSampler(expected, 4, False)), count)
        assert all(flatten_batches(seen) == expected for seen in ranks)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dispatch", [None, True])
def test_samples_after_skip_first_batches_are_gathered_once(count, dispatch):
    """Accelerate loses the batch size after a skip, so that padding gets into the metrics."""
    for n in (10, 13, 25):
        make = lambda n=n: DataLoader(Numbers(n), batch_size=4)  # noqa: E731
        for num_skipped in (0, 1, 2):
            ranks = gather_epoch(make, count, skip=num_skipped, dispatch_batches=dispatch)
            assert all(flatten_batches(seen) == list(range(n))[num_skipped * 4 * count :] for seen in ranks)


def test_drop_last_drops_samples():
    ranks = gather_epoch(lambda: DataLoader(Numbers(10), batch_size=3, drop_last=True), 2)
    assert all(flatten_batches(seen) == list(range(6)) for seen in ranks)


# -------------------------------------------------------------------- types of values


def make_values(batch):
    rows = batch.tolist()
    return {
        "cube": batch.reshape(-1, 1, 1).expand(-1, 2, 3),
        "flags": batch % 2 == 0,
        "array": numpy.array(rows, dtype=numpy.int16).reshape(-1, 1),
        "text": [f"row {row}" for row in rows],
        "ragged": [torch.arange(row % 4 + 1) for row in rows],
        "ragged lists": [list(range(row % 3)) for row in rows],
        "objects": [{"id": row} for row in rows],
        "pair": Pair(batch, (batch.float(), {"deep": batch})),
    }


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("even_batches", [True, False])
def test_values_of_many_types_are_gathered(count, even_batches):
    n = 14
    expected = make_values(torch.arange(n))
    for seen in gather_epoch(
        lambda: DataLoader(Numbers(n), batch_size=5), count, make_values, even_batches=even_batches
    ):
        for key in ("cube", "flags"):
            assert torch.equal(torch.cat([each[key] for each in seen]), expected[key])
        array = numpy.concatenate([each["array"] for each in seen])
        assert array.dtype == numpy.int16
        assert (array == expected["array"]).all()
        for key in ("text", "ragged lists", "objects"):
            assert [item for each in seen for item in each[key]] == expected[key]
        ragged = [item for each in seen for item in each["ragged"]]
        assert [item.tolist() for item in ragged] == [item.tolist() for item in expected["ragged"]]
        assert all(isinstance(each["pair"], Pair) for each in seen)
        assert flatten_batches(each["pair"].right[1]["deep"] for each in seen) == list(range(n))


def test_mapping_of_another_class_is_gathered():
    ranks = gather_epoch(lambda: DataLoader(Numbers(5), batch_size=2), 2, lambda b: collections.UserDict(logits=b))
    assert flatten_batches(each["logits"] for each in ranks[0]) == list(range(5))


def test_list_of_whole_batch_tensors_is_a_structure():
    # In the last round, each rank has two samples, as many as the list has items. Only the previous rounds, or a rank
    # with other lengths, show that the list is not one item per sample.
    for seen in gather_epoch(lambda: DataLoader(Numbers(7), batch_size=4), 2, lambda b: [b, b * 2], even_batches=False):
        assert [len(each) for each in seen] == [2]
        assert flatten_batches([seen[0][0]]) == list(range(7))


def test_ragged_tensors_with_equal_lengths_by_chance():
    """On rank 0, both tensors have two rows, but not on rank 1. So the list has one item per sample on both ranks."""
    lengths = {0: 2, 1: 2, 2: 3, 3: 1}
    take = lambda batch: [torch.full((lengths[int(i)],), int(i)) for i in batch]  # noqa: E731
    for seen in gather_epoch(lambda: DataLoader(Numbers(4), batch_size=2), 2, take):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1], [2, 2, 2], [3]]


def test_ambiguous_list_is_refused_on_every_rank():
    take = lambda batch: [torch.full((2,), int(i)) for i in batch]  # noqa: E731
    heard = []

    def run_rank(rank, collectives):
        loader = prepare(DataLoader(Numbers(4), batch_size=2), rank, 2, collectives)
        for batch in loader:
            try:
                gather_for_metrics(take(batch), loader, collectives, False)
            except MetricError as error:
                heard.append(str(error))

    run_with_tensor_collectives(2, run_rank)
    assert len(heard) == 2
    assert "use_gather_object=True" in heard[0]
    for seen in gather_epoch(lambda: DataLoader(Numbers(4), batch_size=2), 2, take, use_gather_object=True):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    for seen in gather_epoch(lambda: DataLoader(Numbers(2), batch_size=2), 1, take):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1]]


# -------------------------------------------------------------------- nested loaders


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nested_loaders_gather_their_own_samples(count):
    def run_rank(rank, collectives):
        active = []
        outer = prepare(DataLoader(Numbers(7), batch_size=2), rank, count, collectives, active=active)
        inner = prepare(DataLoader(Numbers(5), batch_size=3), rank, count, collectives, active=active)
        seen, evaluated = [], []
        for number, batch in enumerate(outer):
            assert active[-1] is outer
            for other in inner:
                evaluated.append(gather_for_metrics(other, active[-1], collectives, False))
                if number == 0:
                    break
            seen.append(gather_for_metrics(batch, active[-1], collectives, False))
        return flatten_batches(seen), flatten_batches(evaluated), active

    for seen, evaluated, active in run_with_tensor_collectives(count, run_rank):
        assert seen == list(range(7))
        num_whole = -(-7 // (2 * count)) - 1
        assert evaluated == list(range(min(5, 3 * count))) + list(range(5)) * num_whole
        assert active == []


# -------------------------------------------------------------------- values that are not one per sample


class SingleProcessCollectives:
    """Collectives of one process."""

    world_size = 1

    def gather_numbers(self, values):
        return [list(values)]

    def gather(self, tree):
        return tree

    def gather_objects(self, obj):
        return [obj]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor(1.0), "one value for the whole batch"),
        (numpy.array(1.0), "one value for the whole batch"),
        (torch.ones(3), r"shape \(3,\) for a batch of 4 samples"),
        (numpy.ones((5, 2)), r"shape \(5, 2\) for a batch of 4"),
        (["a", "b"], "a list of 2 items for a batch of 4"),
        ({"loss": 0.5}, "float .* reduce_mean"),
        ("text", "str"),
        ((torch.ones(4), None), "NoneType"),
    ],
)
def test_value_without_one_entry_per_sample_is_refused(value, said):
    loader = prepare(DataLoader(Numbers(4), batch_size=4))
    for _ in loader:
        with pytest.raises(MetricError, match=said):
            gather_for_metrics(value, loader, SingleProcessCollectives(), False)


def test_without_a_loader_all_values_are_gathered():
    assert gather_for_metrics(torch.arange(3), None, SingleProcessCollectives(), False).tolist() == [0, 1, 2]
    with pytest.raises(MetricError, match="whole batch"):
        gather_for_metrics(torch.tensor(3), None, SingleProcessCollectives(), False)


# -------------------------------------------------------------------- a value repeated to the batch size


@pytest.mark.parametrize("values", [lambda: torch.tensor(0.5).repeat(4), lambda: numpy.full(4, 0.5), lambda: [0.5] * 4])
def test_value_repeated_to_the_full_batch_size_is_cut_with_one_warning(values, caplog):
    """Scripts gather loss.repeat(batch_size), but the last batch of an epoch has fewer rows."""
    loader = prepare(DataLoader(Numbers(10), batch_size=4))
    gathered = [
        gather_for_metrics(values(), loader, SingleProcessCollectives(), False) for _ in range(2) for _ in loader
    ]
    assert [len(each) for each in gathered] == [4, 4, 2] * 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "for a batch of 2 samples" in messages[0]
    assert "loss.repeat(len(batch))" in messages[0]


@pytest.mark.parametrize("size", [3, 5])
def test_other_sizes_are_errors(size):
    loader = prepare(DataLoader(Numbers(6), batch_size=4))
    for batch in loader:
        if len(batch) == 2:
            with pytest.raises(MetricError, match=rf"shape \({size},\) for a batch of 2 samples"):
                gather_for_metrics(torch.ones(size), loader, SingleProcessCollectives(), False)
