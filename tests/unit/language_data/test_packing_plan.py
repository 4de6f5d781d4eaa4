"""Test packing plans: each token occurs once, no sequence is too long, and best fit equals the textbook algorithm."""

import random
from itertools import pairwise

import numpy
import pytest

from headway.errors import ConfigError, DataError
from headway.language_data.packing_plan import STRATEGIES, PackingPlan, assign_bins, make_packing_plan


def draw_lengths(chooser: random.Random, capacity: int) -> list[int]:
    return [chooser.choice((0, chooser.randint(1, capacity), chooser.randint(1, 3 * capacity))) for _ in range(60)] + [
        1
    ]


def list_tokens(plan: PackingPlan) -> list[tuple[int, int]]:
    """Return (sample, place in the sample) of every token in the plan."""
    return [
        (piece.sample, place)
        for sequence in range(len(plan))
        for piece in plan.list_pieces(sequence)
        for place in range(piece.start, piece.stop)
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [None, 3])
def test_every_token_is_in_one_sequence(strategy: str, seed: int | None) -> None:
    chooser = random.Random(0)
    for _ in range(40):
        capacity, window = chooser.randint(1, 40), chooser.choice((1, 7, 1000))
        lengths = draw_lengths(chooser, capacity)
        plan = make_packing_plan(lengths, capacity, strategy=strategy, long_samples="split", seed=seed, window=window)
        expected = [(sample, place) for sample, length in enumerate(lengths) for place in range(length)]
        assert sorted(list_tokens(plan)) == expected
        sizes = [sum(piece.stop - piece.start for piece in plan.list_pieces(number)) for number in range(len(plan))]
        assert 0 < min(sizes) <= max(sizes) <= capacity
        assert plan.num_tokens == sum(lengths) == sum(sizes)
        assert plan.padding_share == pytest.approx(1 - sum(sizes) / (len(sizes) * capacity))


@pytest.mark.parametrize("strategy", ["best_fit", "in_order"])
def test_truncated_samples_keep_their_beginning(strategy: str) -> None:
    lengths = draw_lengths(random.Random(1), 10)
    plan = make_packing_plan(lengths, 10, strategy=strategy, long_samples="truncate")
    expected = [(sample, place) for sample, length in enumerate(lengths) for place in range(min(length, 10))]
    assert sorted(list_tokens(plan)) == expected
    assert plan.num_cut_tokens == sum(lengths) - len(expected) > 0


def place_by_hand(sizes: list[int], capacity: int) -> list[int]:
    """Put each size into the fullest bin in which it fits. Return the free room of all bins."""
    rooms: list[int] = []
    for size in sizes:
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


def test_best_fit_equals_the_textbook_algorithm() -> None:
    chooser = random.Random(2)
    for _ in range(300):
        capacity = chooser.randint(1, 60)
        sizes = sorted((chooser.randint(1, capacity) for _ in range(chooser.randint(1, 80))), reverse=True)
        loads = numpy.bincount(assign_bins(numpy.array(sizes), capacity), weights=sizes)
        assert sorted((capacity - loads).tolist()) == place_by_hand(sizes, capacity)


def test_in_order_closes_a_sequence_at_the_first_sample_that_does_not_fit() -> None:
    lengths = [3, 4, 4, 1, 10, 2, 9]
    plan = make_packing_plan(lengths, 10, strategy="in_order")
    assert [[piece.sample for piece in plan.list_pieces(number)] for number in range(len(plan))] == [
        [0, 1], [2, 3], [4], [5], [6],
    ]  # fmt: skip


def test_split_cuts_the_joined_samples() -> None:
    plan = make_packing_plan([3, 6, 0, 2], 4, strategy="split")
    assert [list(map(tuple, plan.list_pieces(number))) for number in range(len(plan))] == [
        [(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 6), (3, 0, 2)],
    ]  # fmt: skip


def test_order_of_samples_is_kept_between_windows() -> None:
    lengths = draw_lengths(random.Random(3), 20) * 5
    plan = make_packing_plan(lengths, 20, long_samples="split", window=32)
    windows = [sorted({piece.sample // 64 for piece in plan.list_pieces(number)}) for number in range(len(plan))]
    assert all(after[0] >= before[-1] - 1 for before, after in pairwise(windows))


def test_plan_depends_on_the_seed_only() -> None:
    lengths = draw_lengths(random.Random(4), 20)
    first, same, other = (
        list_tokens(make_packing_plan(lengths, 20, long_samples="split", seed=seed)) for seed in (5, 5, 6)
    )
    assert first == same != other


def test_million_samples_are_planned() -> None:
    lengths = numpy.clip(numpy.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(int), 1, 4096)
    plan = make_packing_plan(lengths, 4096, seed=1, window=1_000_000)
    assert plan.num_tokens == lengths.sum()
    assert plan.padding_share < 0.001


@pytest.mark.parametrize(
    ("lengths", "given", "kind", "text"),
    [
        ([3, -1], {}, DataError, r"lengths\[1\] is -1"),
        ([3.5], {}, DataError, "one whole number for each sample"),
        ([[3]], {}, DataError, "one whole number for each sample"),
        ([0, 0], {}, DataError, "none of the 2 samples has a token"),
        ([], {}, DataError, "none of the 0 samples has a token"),
        ([3, 9, 12], {}, DataError, "2 of 3 samples are longer .* 8 tokens; the longest is sample 2 with 12"),
        ([3], {"strategy": "bfd"}, ConfigError, "allowed: best_fit, in_order, split"),
        ([3], {"long_samples": "drop"}, ConfigError, "allowed: error, split, truncate"),
        ([3], {"window": 0}, ConfigError, "window=0"),
        ([3], {"sequence_length": 0}, ConfigError, "sequence_length=0"),
    ],
)
def test_invalid_arguments_are_errors(lengths: list[int], given: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_packing_plan(lengths, **{"sequence_length": 8, **given})
