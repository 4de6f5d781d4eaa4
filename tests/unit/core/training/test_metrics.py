"""gather_for_metrics with threads as ranks: every sample once, in the data's order, for every length and world size."""

import collections

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from headway.core.runtime.collectives.tree import list_tensors, map_tensors
from headway.core.training.metrics import gather_for_metrics
from headway.errors import MetricError
from tests.unit.core.data.fakes import Numbers, SizedStream, Stream, ThreadCollectives, on_ranks, prepare

Pair = collections.namedtuple("Pair", "left right")


class Door(ThreadCollectives):
    """Threads that can gather tensors too."""

    def gather(self, tree):
        ranks = [list(list_tensors(row)) for row in self.gather_objects(tree)]
        joined = iter([torch.cat(column) for column in zip(*ranks, strict=True)])
        return map_tensors(lambda _: next(joined), tree)


def on_doors(count, function):
    return on_ranks(count, lambda rank, lent: function(rank, Door(rank, lent.meeting)))


def everything(make, count, values=lambda batch: batch, skip=0, use_gather_object=False, **config):
    """What each rank's loop over gather_for_metrics sees, batch after batch."""

    def main(rank, collectives):
        loader = prepare(make(), rank, count, collectives, **config)
        loader = loader.skip(skip) if skip else loader
        return [gather_for_metrics(values(batch), loader, collectives, use_gather_object) for batch in loader]

    return on_doors(count, main)


def flat(batches):
    return [int(value) for batch in batches for value in batch]


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_length(count, even_batches):
    for n in range(0, 51, (1, 1, 2, 3, 3)[count - 1]):
        for size in (4,) if n % 5 else (1, 3, 4, 7):
            ranks = everything(lambda: DataLoader(Numbers(n), batch_size=size), count, even_batches=even_batches)
            assert all(flat(seen) == list(range(n)) for seen in ranks), (n, size)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
def test_every_length_of_a_stream(count, kind):
    for n in range(0, 51, 3):
        for even_batches in (True, False):
            ranks = everything(lambda: DataLoader(kind(n), batch_size=4), count, even_batches=even_batches)
            assert all(sorted(flat(seen)) == list(range(n)) for seen in ranks), n
            assert all(flat(seen) == flat(ranks[0]) for seen in ranks)


@pytest.mark.parametrize("count", [2, 4])
def test_every_length_split_batches(count):
    for n in range(0, 51, count // 2):
        ranks = everything(lambda: DataLoader(Numbers(n), batch_size=8), count, split_batches=True)
        assert all(flat(seen) == list(range(n)) for seen in ranks), n


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dispatched_from_the_main_process(count):
    for n in range(0, 51, 7):
        ranks = everything(lambda: DataLoader(Numbers(n), batch_size=4), count, dispatch_batches=True)
        assert all(sorted(flat(seen)) == list(range(n)) for seen in ranks), n


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shuffled_comes_each_once(count):
    for n in (1, 17, 50):
        ranks = everything(lambda: DataLoader(Numbers(n), batch_size=4, shuffle=True), count)
        assert sorted(flat(ranks[0])) == list(range(n))
        assert all(flat(seen) == flat(ranks[0]) for seen in ranks)


def drawn(indices):
    return SubsetRandomSampler(indices, generator=torch.Generator())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sampler_shorter_than_its_dataset(count):
    """Accelerate counts the dataset: 9 of 16 samples came back as 12.

    With a generator of its own: ranks are threads here, which would draw from one global generator at once.
    """
    for n in (1, 9, 10):
        wanted = list(range(3, 3 + n))
        ranks = everything(lambda: DataLoader(Numbers(16), batch_size=4, sampler=drawn(wanted)), count)
        assert all(sorted(flat(seen)) == wanted for seen in ranks)
        ranks = everything(lambda: DataLoader(Numbers(16), batch_sampler=BatchSampler(wanted, 4, False)), count)
        assert all(flat(seen) == wanted for seen in ranks)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dispatch", [None, True])
def test_after_skip_first_batches(count, dispatch):
    """The peer loses the batch size: padding leaked into the metrics after a skip."""
    for n in (10, 13, 25):
        make = lambda n=n: DataLoader(Numbers(n), batch_size=4)  # noqa: E731
        for num_skipped in (0, 1, 2):
            ranks = everything(make, count, skip=num_skipped, dispatch_batches=dispatch)
            assert all(flat(seen) == list(range(n))[num_skipped * 4 * count :] for seen in ranks)


def test_drop_last_drops():
    ranks = everything(lambda: DataLoader(Numbers(10), batch_size=3, drop_last=True), 2)
    assert all(flat(seen) == list(range(6)) for seen in ranks)


# -------------------------------------------------------------------- kinds of values


def kinds(batch):
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
def test_values_of_many_kinds(count, even_batches):
    n = 14
    wanted = kinds(torch.arange(n))
    for seen in everything(lambda: DataLoader(Numbers(n), batch_size=5), count, kinds, even_batches=even_batches):
        for key in ("cube", "flags"):
            assert torch.equal(torch.cat([each[key] for each in seen]), wanted[key])
        array = numpy.concatenate([each["array"] for each in seen])
        assert array.dtype == numpy.int16
        assert (array == wanted["array"]).all()
        for key in ("text", "ragged lists", "objects"):
            assert [item for each in seen for item in each[key]] == wanted[key]
        ragged = [item for each in seen for item in each["ragged"]]
        assert [item.tolist() for item in ragged] == [item.tolist() for item in wanted["ragged"]]
        assert all(isinstance(each["pair"], Pair) for each in seen)
        assert flat(each["pair"].right[1]["deep"] for each in seen) == list(range(n))


def test_a_mapping_of_another_class():
    ranks = everything(lambda: DataLoader(Numbers(5), batch_size=2), 2, lambda b: collections.UserDict(logits=b))
    assert flat(each["logits"] for each in ranks[0]) == list(range(5))


def test_a_list_of_whole_batch_tensors_is_a_structure():
    # The last round has two samples on each rank, as many as the list has members: the other reading is ruled out by
    # nothing but the tuple or a rank that can tell.
    for seen in everything(lambda: DataLoader(Numbers(7), batch_size=4), 2, lambda b: [b, b * 2], even_batches=False):
        assert [len(each) for each in seen] == [2]
        assert flat([seen[0][0]]) == list(range(7))


def test_ragged_tensors_whose_lengths_agree_by_chance():
    """Rank 0's two tensors have two rows each, which rank 1's do not: one item per sample, on both."""
    lengths = {0: 2, 1: 2, 2: 3, 3: 1}
    take = lambda batch: [torch.full((lengths[int(i)],), int(i)) for i in batch]  # noqa: E731
    for seen in everything(lambda: DataLoader(Numbers(4), batch_size=2), 2, take):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1], [2, 2, 2], [3]]


def test_a_list_that_may_be_both_is_refused_on_every_rank():
    take = lambda batch: [torch.full((2,), int(i)) for i in batch]  # noqa: E731
    heard = []

    def main(rank, collectives):
        loader = prepare(DataLoader(Numbers(4), batch_size=2), rank, 2, collectives)
        for batch in loader:
            try:
                gather_for_metrics(take(batch), loader, collectives, False)
            except MetricError as error:
                heard.append(str(error))

    on_doors(2, main)
    assert len(heard) == 2
    assert "use_gather_object=True" in heard[0]
    for seen in everything(lambda: DataLoader(Numbers(4), batch_size=2), 2, take, use_gather_object=True):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    for seen in everything(lambda: DataLoader(Numbers(2), batch_size=2), 1, take):
        assert [item.tolist() for item in seen[0]] == [[0, 0], [1, 1]]


# -------------------------------------------------------------------- nesting, leaving


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loader_inside_a_loader(count):
    def main(rank, collectives):
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
        return flat(seen), flat(evaluated), active

    for seen, evaluated, active in on_doors(count, main):
        assert seen == list(range(7))
        num_whole = -(-7 // (2 * count)) - 1
        assert evaluated == list(range(min(5, 3 * count))) + list(range(5)) * num_whole
        assert active == []


# -------------------------------------------------------------------- what is not an entry per sample


class Alone:
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
def test_what_is_not_per_sample_is_refused(value, said):
    loader = prepare(DataLoader(Numbers(4), batch_size=4))
    for _ in loader:
        with pytest.raises(MetricError, match=said):
            gather_for_metrics(value, loader, Alone(), False)


def test_without_a_loader_everything_is_joined():
    assert gather_for_metrics(torch.arange(3), None, Alone(), False).tolist() == [0, 1, 2]
    with pytest.raises(MetricError, match="whole batch"):
        gather_for_metrics(torch.tensor(3), None, Alone(), False)


# -------------------------------------------------------------------- one value for the batch, repeated to its size


@pytest.mark.parametrize("values", [lambda: torch.tensor(0.5).repeat(4), lambda: numpy.full(4, 0.5), lambda: [0.5] * 4])
def test_a_value_repeated_to_the_full_batch_size_is_cut_once_said(values, caplog):
    """Scripts gather loss.repeat(batch_size), and the last batch of an epoch has fewer rows."""
    loader = prepare(DataLoader(Numbers(10), batch_size=4))
    gathered = [gather_for_metrics(values(), loader, Alone(), False) for _ in range(2) for _ in loader]
    assert [len(each) for each in gathered] == [4, 4, 2] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "for a batch of 2 samples" in said[0]
    assert "loss.repeat(len(batch))" in said[0]


@pytest.mark.parametrize("size", [3, 5])
def test_other_sizes_stay_errors(size):
    loader = prepare(DataLoader(Numbers(6), batch_size=4))
    for batch in loader:
        if len(batch) == 2:
            with pytest.raises(MetricError, match=rf"shape \({size},\) for a batch of 2 samples"):
                gather_for_metrics(torch.ones(size), loader, Alone(), False)
