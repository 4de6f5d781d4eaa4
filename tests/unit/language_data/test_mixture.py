"""Test mixtures of map-style sources: shares, repetition, ends, order on any number of ranks and workers, and invalid use."""

import itertools
import pickle
import random
from collections import Counter
from fractions import Fraction

import datasets
import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from headway import Mixture, TrainingArguments
from headway.errors import ConfigError, DataError
from headway.trainer.data import make_train_sampler
from tests.unit.core.data.fakes import prepare, run_on_ranks

LENGTHS = {"web": 120, "code": 45, "math": 20}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}


class SourceRows(Dataset):
    """Rows that contain their source and number."""

    def __init__(self, name, length):
        self.name = name
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"number": index, "name": self.name}


def build_mixture(lengths=LENGTHS, **options):
    return Mixture(
        {name: SourceRows(name, length) for name, length in lengths.items()}, **{"weights": WEIGHTS, **options}
    )


def read_all(mixture):
    return [(sample["name"], sample["number"]) for sample in (mixture[position] for position in range(len(mixture)))]


def collate(samples):
    return [(sample["name"], sample["number"]) for sample in samples]


# -------------------------------------------------------------------- order


def test_each_sample_names_its_source():
    mixture = build_mixture(seed=1)
    assert mixture.names == ("web", "code", "math")
    for position in range(len(mixture)):
        sample = mixture[position]
        assert mixture.names[sample["source"]] == sample["name"]
    batch = next(iter(DataLoader(mixture, batch_size=8)))
    assert torch.is_tensor(batch["source"])
    assert [mixture.names[source] for source in batch["source"]] == batch["name"]


def test_tuples_and_other_samples_get_their_source_on_request():
    sources = {"pairs": [(1, 2), (3, 4)], "more": [(5, 6)]}
    assert all(len(sample) == 2 for sample in map(Mixture(sources).__getitem__, range(3)))
    assert {sample[2] for sample in map(Mixture(sources, adds_source=True).__getitem__, range(3))} == {0, 1}
    numbers = Mixture({"one": [7]}, adds_source=True)
    assert numbers[0] == (7, 0)
    assert "source" not in build_mixture(adds_source=False)[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_pass_over_a_source_has_each_sample_once_in_another_order(seed):
    mixture = build_mixture(seed=seed, num_samples=400)
    orders = {name: [number for source, number in read_all(mixture) if source == name] for name in LENGTHS}
    for name, length in LENGTHS.items():
        passes = [orders[name][start : start + length] for start in range(0, len(orders[name]), length)]
        for each in passes:
            assert len(set(each)) == len(each)
        assert sorted(passes[0]) == list(range(length))
        assert len(passes) < 2 or passes[0][: len(passes[1])] != passes[1]
    assert (
        read_all(build_mixture(seed=seed, num_samples=400))
        == read_all(mixture)
        != read_all(build_mixture(seed=9, num_samples=400))
    )


def test_shares_hold_at_every_prefix():
    mixture = build_mixture(num_samples=1000)
    counts = Counter()
    for position, (name, _) in enumerate(read_all(mixture), start=1):
        counts[name] += 1
        assert all(abs(counts[each] - Fraction(repr(weight)) * position) < 1 for each, weight in WEIGHTS.items())
        assert mixture.count_samples(position) == {each: counts[each] for each in LENGTHS}


def test_large_sources_are_shuffled_without_a_permutation_in_memory():
    mixture = Mixture({"large": range(70_000), "small": range(10)}, weights=[1, 0], num_samples=70_000)
    order = [mixture[position] for position in range(70_000)]
    assert sorted(order) == list(range(70_000))
    assert order != sorted(order)
    halves = sum(index < 35_000 for index in order[:35_000])  # 17,500 with a standard deviation of 66
    assert abs(halves - 17_500) < 500
    neighbors = sum(abs(one - other) < 10 for one, other in itertools.pairwise(order))  # about 18 by chance
    assert neighbors < 60


def test_without_shuffling_sources_keep_their_order():
    mixture = build_mixture(shuffle=False)
    numbers = [number for name, number in read_all(mixture) if name == "code"]
    assert numbers == [at % 45 for at in range(len(numbers))]


def test_nested_mixture_keeps_its_shares():
    inner = Mixture({"a": range(10), "b": range(100, 110)}, weights=[0.5, 0.5], shuffle=False)
    outer = Mixture({"inner": inner, "c": range(1000, 1010)}, weights=[0.8, 0.2], num_samples=25)
    found = [outer[position] for position in range(25)]
    assert [value for value in found if value < 1000] == [inner[position] for position in range(20)]


# -------------------------------------------------------------------- epochs and ends


def test_epochs_continue_if_all_sources_repeat():
    whole = read_all(build_mixture(num_samples=300))
    parts = build_mixture(num_samples=100)
    found = []
    for epoch in range(3):
        parts.set_epoch(epoch)
        found += read_all(parts)
    assert found == whole


@pytest.mark.parametrize("epoch", [0, 3])
def test_dropped_sources_give_each_sample_once_per_epoch(epoch):
    mixture = build_mixture(when_source_ends="drop")
    first = read_all(mixture)
    mixture.set_epoch(epoch)
    found = read_all(mixture)
    assert sorted(found) == sorted((name, number) for name, length in LENGTHS.items() for number in range(length))
    assert (found == first) == (epoch == 0)


def test_epoch_stops_at_the_sample_that_an_ended_source_lacks():
    mixture = build_mixture(when_source_ends="stop")
    found = read_all(mixture)
    assert len(set(found)) == len(found)
    longer = read_all(build_mixture(num_samples=len(found) + 1))
    assert longer[: len(found)] == found
    assert max(Counter(longer).values()) == 2  # one more sample would have been a repeated one


def test_each_source_may_end_differently():
    mixture = build_mixture(when_source_ends={"web": "stop", "code": "drop", "math": "repeat"})
    counts = Counter(name for name, _ in read_all(mixture))
    assert counts["web"] == 120
    assert counts["code"] == 45
    assert counts["math"] > 20
    with pytest.raises(ConfigError, match="num_samples"):
        build_mixture(when_source_ends={"web": "repeat", "code": "drop", "math": "drop"})


def test_weights_change_at_the_updates_of_the_schedule():
    schedule = {0: [1, 0, 0], 5: {"web": 0, "code": 0.5, "math": 0.5}, 20: [0.2, 0.3, 0.5]}
    mixture = build_mixture(weights=schedule, samples_per_update=6, num_samples=200)
    names = [name for name, _ in read_all(mixture)]
    assert set(names[:30]) == {"web"}
    assert set(names[30:120]) == {"code", "math"}
    counts = Counter(names[:120])
    assert counts == {"web": 30, "code": 45, "math": 45}
    for end in range(121, 200):
        later = Counter(names[120:end])
        shares = {"web": Fraction(2, 10), "code": Fraction(3, 10), "math": Fraction(5, 10)}
        assert all(abs(later[name] - share * (end - 120)) < 1 for name, share in shares.items())


# -------------------------------------------------------------------- ranks, workers and resuming


def read_on(count, num_workers, batch_size, state=None, num_batches=None, epoch=None, **options):
    """Return the samples that `count` ranks read, in the order of the epoch, and the final state of a loader."""

    def read_rank(rank, collectives):
        loader = DataLoader(
            build_mixture(**options), batch_size=batch_size, num_workers=num_workers, collate_fn=collate
        )
        loader = prepare(loader, rank, count, collectives if count > 1 else None)
        if state is not None:
            loader.load_state_dict(state)
        if epoch is not None:
            loader.set_epoch(epoch)
        rounds = []
        for number, batch in enumerate(loader, start=1):
            rounds.append(batch[: loader.num_valid])
            if number == num_batches:
                return rounds, loader.state_dict()
        return rounds, loader.state_dict()

    ranks = run_on_ranks(count, read_rank)
    samples = [sample for parts in zip(*(rounds for rounds, _ in ranks)) for part in parts for sample in part]
    assert all(state == ranks[0][1] for _, state in ranks)
    return samples, ranks[0][1]


@pytest.mark.parametrize(("count", "num_workers"), [(1, 0), (2, 0), (4, 0), (1, 1), (1, 3), (2, 1), (2, 3)])
def test_ranks_and_workers_read_one_order(count, num_workers):
    mixture = build_mixture(seed=4)
    for epoch in (0, 2):
        mixture.set_epoch(epoch)
        samples, _ = read_on(count, num_workers, 3, epoch=epoch, seed=4)
        assert samples == read_all(mixture)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["repeat", "drop", "stop"])
def test_fifty_double_resumes_on_other_ranks_and_workers(ends):
    draw = random.Random(ends)
    options = {"seed": 11, "when_source_ends": ends}
    whole = read_all(build_mixture(**options))
    for number in range(50):
        found, state = [], None
        for part in range(3):
            # Worker processes take a tenth of a second each, so only one in ten runs uses them.
            num_workers = draw.choice([1, 3]) if number % 10 == 0 else 0
            count, size = draw.choice([1, 2, 4]), draw.randint(1, 4)
            num_batches = draw.randint(1, 5) if part < 2 else None
            samples, state = read_on(count, num_workers, size, state, num_batches, **options)
            found += samples
        assert found == whole


def test_persistent_workers_read_each_epoch():
    loader = DataLoader(
        build_mixture(when_source_ends="drop"), batch_size=5, num_workers=2, persistent_workers=True, collate_fn=collate
    )
    loader = prepare(loader)
    epochs = [[sample for batch in loader for sample in batch] for _ in range(3)]
    mixture = build_mixture(when_source_ends="drop")
    for epoch, found in enumerate(epochs):
        mixture.set_epoch(epoch)
        assert found == read_all(mixture)


def test_pickled_copy_has_the_same_order():
    mixture = build_mixture(seed=3)
    mixture.set_epoch(2)
    assert read_all(pickle.loads(pickle.dumps(mixture))) == read_all(mixture)


def test_resume_with_another_order_warns():
    _, state = read_on(1, 0, 4, num_batches=3)
    with pytest.warns(UserWarning, match="in the order of a Mixture of web, code, math"):
        read_on(1, 0, 4, state=state, seed=1)


class Table(SourceRows):
    """Source that reads several rows at once, as `datasets.Dataset` does, and counts its reads."""

    num_reads = 0

    def __getitems__(self, indices):
        self.num_reads += 1
        return [self[index] for index in indices]


def test_batch_reads_each_source_once():
    sources = {"web": Table("web", 40), "code": SourceRows("code", 30), "math": Table("math", 20)}
    mixture = Mixture(sources, weights=[0.5, 0.3, 0.2], seed=2)
    positions = [7, 3, 3, 60, 0, 12, 89, 31]
    assert mixture.__getitems__(positions) == [mixture[position] for position in positions]
    assert sources["web"].num_reads == sources["math"].num_reads == 1
    mixture.set_epoch(2)
    assert mixture.__getitems__(positions) == [mixture[position] for position in positions]


# -------------------------------------------------------------------- invalid use


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": [0.5, -0.1, 0.6]}, "'code' is -0.1"),
        ({"weights": [0.5, float("nan"), 0.6]}, "'code' is nan"),
        ({"weights": [0.5, "much", 0.6]}, "'code' is 'much'"),
        ({"weights": [0.5, True, 0.6]}, "'code' is True"),
        ({"weights": [0, 0, 0]}, "are 0"),
        ({"weights": [1, 2]}, "2 numbers for 3 sources"),
        ({"weights": {"web": 1, "code": 2}}, "give each source one weight"),
        ({"weights": {"web": 1, "code": 2, "maths": 3}}, "maths"),
        ({"weights": 3}, "one number per source"),
        ({"weights": [1, 1, 1e-9]}, "'math' has the share"),
        ({"weights": {0: [1, 1, 1], "web": 2}}, "numbers of updates"),
        ({"weights": {5: [1, 1, 1]}, "samples_per_update": 4}, "the first must be 0"),
        ({"weights": {0: [1, 1, 1], 5: [1, 0, 0]}}, "samples_per_update"),
        ({"when_source_ends": "again"}, "'again'"),
        ({"when_source_ends": {"web": "stop"}}, "one of these words for each"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_arguments_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build_mixture(**options)


def test_invalid_sources_are_refused():
    with pytest.raises(ConfigError, match="give datasets by name"):
        Mixture([[1, 2], [3]])
    with pytest.raises(ConfigError, match="give datasets by name"):
        Mixture({})
    with pytest.raises(DataError, match="'none' is empty"):
        Mixture({"some": [1], "none": []})
    with pytest.raises(DataError, match="'number' is a int"):
        Mixture({"number": 3})
    with pytest.raises(DataError, match="only once"):
        Mixture({"one": iter([1, 2])}, weights=[1])
    with pytest.raises(DataError, match="already has the entry 'source'"):
        Mixture({"one": [{"source": 3}]})[0]
    with pytest.raises(IndexError):
        build_mixture()[len(build_mixture())]


def test_loader_that_shuffles_a_mixture_is_refused():
    with pytest.raises(DataError, match="leave shuffle=True out"):
        prepare(DataLoader(build_mixture(), batch_size=4, shuffle=True))


def test_trainer_reads_a_mixture_in_its_order():
    arguments = TrainingArguments(output_dir="unused")
    assert type(make_train_sampler(build_mixture(), arguments, batch_size=4)) is SequentialSampler
    assert type(make_train_sampler(SourceRows("web", 3), arguments, batch_size=4)) is RandomSampler


@pytest.mark.parametrize("kind", ["joined", "indices", "columns", "formats"])
def test_tables_give_the_samples_of_single_reads(kind: str) -> None:
    tables = {
        name: datasets.Dataset.from_dict({"x": [[n, at] for n in range(9 + at)]}) for at, name in enumerate("abc")
    }
    if kind == "indices":
        tables["b"] = tables["b"].select([3, 1, 7, 0, 2])
    elif kind == "columns":
        tables["b"] = tables["b"].add_column("y", list(range(len(tables["b"]))))
    elif kind == "formats":
        tables["b"] = tables["b"].with_format("numpy")
    mixture = Mixture(tables, weights=[0.5, 0.3, 0.2], seed=1)
    expected = []
    for position in range(len(mixture)):
        source, index = mixture.find_sample(position)
        expected.append({**mixture.sources[source][index], "source": source})
    assert repr(mixture.__getitems__(list(range(len(mixture))))) == repr(expected)
    mixture.sources[0].set_format("numpy")
    mixture.sources[1].set_format("numpy")
    mixture.sources[2].set_format("numpy")
    assert all(type(sample["x"]) is numpy.ndarray for sample in mixture.__getitems__([0, 1, 2, 3]))
    again = pickle.loads(pickle.dumps(mixture))
    assert repr(again.__getitems__([5, 6])) == repr(mixture.__getitems__([5, 6]))


def test_sample_that_the_weights_grant_only_in_part_does_not_end_the_epoch():
    """Source a gets 1.5 samples before its weight becomes 0. It has one, and never needs a second."""
    mixture = Mixture(
        {"a": SourceRows("a", 1), "b": SourceRows("b", 1000)},
        weights={0: [0.5, 0.5], 3: [0, 1]},
        samples_per_update=1,
        when_source_ends={"a": "stop", "b": "repeat"},
        num_samples=100,
        seed=0,
    )
    names = [name for name, _ in read_all(mixture)]
    assert len(names) == 100
    assert names.count("a") in (1, 2)
