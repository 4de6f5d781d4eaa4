"""Test mixtures with sources that can only be iterated: order, ends, positions, and invalid use."""

import pickle
import random
from collections import Counter
from fractions import Fraction

import pytest
from torch.utils.data import DataLoader, IterableDataset

from headway import Mixture
from headway.errors import DataError, StateError
from tests.unit.core.data.fakes import prepare, run_on_ranks


class Stream(IterableDataset):
    """Numbers whose order depends on the epoch."""

    def __init__(self, name, length):
        self.name = name
        self.length = length
        self.epoch = 0
        self.num_read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self):
        return random.Random(self.epoch).sample(range(self.length), self.length)

    def __iter__(self):
        for number in self.order():
            self.num_read += 1
            yield self.name, number


class Positioned(Stream):
    """Stream that keeps its position."""

    position = 0

    def __iter__(self):
        begin, self.position = self.position, 0
        for at, number in list(enumerate(self.order()))[begin:]:
            self.num_read += 1
            self.position = at + 1
            yield self.name, number
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def build_mixture(kind=Stream, **options):
    sources = {"web": kind("web", 60), "code": [("code", number) for number in range(25)], "math": kind("math", 11)}
    return Mixture(sources, **{"weights": [0.5, 0.3, 0.2], "seed": 2, **options})


def test_shares_hold_at_every_prefix_and_each_pass_is_complete():
    found = list(build_mixture(num_samples=300))
    counts = Counter()
    for position, (name, _) in enumerate(found, start=1):
        counts[name] += 1
        for each, share in zip(("web", "code", "math"), (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))):
            assert abs(counts[each] - share * position) < 1
    for name, length in (("web", 60), ("code", 25), ("math", 11)):
        numbers = [number for each, number in found if each == name]
        assert sorted(numbers[:length]) == list(range(length))
        assert numbers[:length] != numbers[length : 2 * length]


def test_iterables_alternate_like_sources_with_indices():
    indexed = Mixture(
        {name: [(name, at) for at in range(60)] for name in ("a", "b")}, weights=[0.7, 0.3], shuffle=False
    )
    streams = Mixture(
        {"a": [("a", at) for at in range(60)], "b": Unshuffled("b", 60)},
        weights=[0.7, 0.3],
        shuffle=False,
        num_samples=80,
    )
    assert list(streams) == [indexed[position] for position in range(80)]


class Unshuffled(Stream):
    def order(self):
        return range(self.length)


def test_dropped_sources_give_each_sample_once():
    found = list(build_mixture(when_source_ends="drop"))
    assert Counter(found) == Counter(
        [("web", at) for at in range(60)] + [("code", at) for at in range(25)] + [("math", at) for at in range(11)]
    )


def test_ended_source_stops_the_epoch():
    found = list(build_mixture(when_source_ends="stop"))
    assert len(set(found)) == len(found)
    assert Counter(name for name, _ in found)["math"] == 11


def test_each_epoch_begins_its_sources_again():
    mixture = build_mixture(when_source_ends="drop")
    epochs = []
    for epoch in (0, 1, 0):
        mixture.set_epoch(epoch)
        epochs.append(list(mixture))
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.parametrize("kind", [Stream, Positioned])
@pytest.mark.parametrize("ends", ["repeat", "drop", "stop"])
def test_saved_position_continues_the_order(kind, ends):
    draw = random.Random(ends)
    options = {"when_source_ends": ends, "num_samples": 200}
    whole = list(build_mixture(kind, **options))
    for _ in range(20):
        found, state = [], None
        for stop in (draw.randint(1, 90), draw.randint(1, 90), None):
            mixture = build_mixture(kind, **options)
            if state is not None:
                mixture.load_state_dict(state)
            for sample in mixture:
                found.append(sample)
                stop = stop and stop - 1
                if stop == 0:
                    break
            state = mixture.state_dict()
        # An order that was read to its end begins again when it is continued.
        assert found[: len(whole)] == whole


def test_source_with_a_position_is_not_read_again():
    mixture = build_mixture(Positioned, num_samples=200)
    for _ in zip(range(50), mixture):
        pass
    again = build_mixture(Positioned, num_samples=200)
    again.load_state_dict(mixture.state_dict())
    rest = list(again)
    assert again.sources[0].num_read == sum(name == "web" for name, _ in rest)


@pytest.mark.parametrize(("count", "num_workers"), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1)])
def test_ranks_read_one_order_and_resume_on_other_numbers(count, num_workers):
    whole = list(build_mixture(when_source_ends="drop"))

    def read_rank(rank, collectives, count, num_workers, state, num_batches):
        loader = DataLoader(
            build_mixture(when_source_ends="drop"), batch_size=3, num_workers=num_workers, collate_fn=list
        )
        loader = prepare(loader, rank, count, collectives if count > 1 else None)
        if state is not None:
            loader.load_state_dict(state)
        rounds = []
        for batch in loader:
            rounds.append(batch[: loader.num_valid])
            if len(rounds) == num_batches:
                break
        return rounds, loader.state_dict()

    def read_on(count, num_workers, state=None, num_batches=None):
        ranks = run_on_ranks(count, lambda *on: read_rank(*on, count, num_workers, state, num_batches))
        rounds = zip(*(rounds for rounds, _ in ranks))
        return [sample for parts in rounds for part in parts for sample in part], ranks[0][1]

    assert read_on(count, num_workers)[0] == whole
    first, state = read_on(count, num_workers, num_batches=2)
    second, state = read_on(2, 0, state, 3)
    third, _ = read_on(1, 1, state)
    assert first + second + third == whole


def test_invalid_use_is_refused():
    with pytest.raises(DataError, match="num_workers=0 or 1"):
        list(DataLoader(build_mixture(num_samples=20), batch_size=2, num_workers=2))
    with pytest.raises(DataError, match="has no positions"):
        build_mixture()[0]
    with pytest.raises(DataError, match="'empty' gave no sample"):
        list(Mixture({"empty": Stream("empty", 0), "some": [1]}, weights=[1, 1]))
    with pytest.raises(TypeError):
        len(build_mixture(when_source_ends="drop"))
    mixture = build_mixture()
    next(iter(mixture))
    with pytest.raises(StateError, match="was saved by a Mixture"):
        build_mixture(seed=7).load_state_dict(mixture.state_dict())


def test_epoch_ends_where_all_remaining_sources_have_no_weight():
    """A dropped source leaves the order without any weight from position 10 on, as in a mixture of indexed sources."""
    options = {"weights": {0: [0.5, 0.5], 10: [0, 1]}, "samples_per_update": 1, "seed": 0}
    ends = {"when_source_ends": {"a": "repeat", "b": "drop"}}
    indexed = Mixture({"a": [("a", n) for n in range(4)], "b": [("b", n) for n in range(3)]}, **options, **ends)
    streamed = Mixture({"a": Stream("a", 4), "b": Stream("b", 3)}, **options, **ends)
    expected = [indexed[position][0] for position in range(len(indexed))]
    found = [sample[0] for sample, _ in zip(streamed, range(50))]
    assert len(expected) == 10
    assert sorted(found) == sorted(expected)
    assert found.count("b") == 3


def test_mixture_that_is_being_read_can_be_pickled() -> None:
    mixture = build_mixture(num_samples=20)
    iterator = iter(mixture)
    next(iterator)
    copy = pickle.loads(pickle.dumps(mixture))  # a worker that is spawned gets such a copy
    assert list(copy) == list(mixture)
