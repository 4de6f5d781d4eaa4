"""Test batches by tokens: sizes, padding, the same plan on all ranks, and invalid use."""

import numpy
import pytest
from torch.utils.data import DataLoader

from headway import TokenBatchSampler
from headway.errors import ConfigError, DataError
from tests.unit.core.data.fakes import prepare, run_on_ranks


def draw_lengths(number, seed=0, sigma=1.0):
    draw = numpy.random.default_rng(seed)
    return numpy.clip(draw.lognormal(5, sigma, number), 1, 4000).astype(int)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_batches_are_nearly_equal_and_padding_is_small(sigma, tokens):
    lengths = draw_lengths(20_000, sigma=sigma)
    plan = TokenBatchSampler(lengths, tokens, seed=1).plan_epoch()
    assert sorted(index for batch in plan for index in batch) == list(range(20_000))
    padded = [len(batch) * max(lengths[batch]) for batch in plan]
    assert max(padded) <= tokens
    assert 1 - lengths.sum() / sum(padded) <= 0.05
    assert lengths.sum() / len(plan) >= 0.85 * tokens


def test_plan_depends_on_seed_and_epoch_only():
    lengths = draw_lengths(3000)
    sampler = TokenBatchSampler(lengths, 4096, seed=1)
    first = sampler.plan_epoch()
    sampler.set_epoch(1)
    second = sampler.plan_epoch()
    sampler.set_epoch(0)
    assert sampler.plan_epoch() == first != second
    assert TokenBatchSampler(lengths.tolist(), 4096, seed=2).plan_epoch() != first
    assert TokenBatchSampler(list(lengths), 4096, seed=1).plan_epoch() == first


def test_updates_have_a_fixed_number_of_batches():
    lengths = draw_lengths(1000)
    sampler = TokenBatchSampler(lengths, 4096, global_batch_tokens=8 * 4096)
    assert sampler.batches_per_update == 8
    assert len(sampler) % 8 == 0
    assert sorted(index for batch in sampler for index in batch) == list(range(1000))
    assert [sampler.count_steps(ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ConfigError, match="among 3 processes"):
        sampler.count_steps(3)


def read_on(count, state=None, num_rounds=None):
    lengths = draw_lengths(400)

    def read_rank(rank, collectives):
        sampler = TokenBatchSampler(lengths, 4096, global_batch_tokens=4 * 4096, seed=3)
        loader = prepare(DataLoader(range(400), batch_sampler=sampler, collate_fn=list), rank, count, collectives)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for batch in loader:
            assert loader.num_valid == len(batch)  # nothing is repeated
            batches.append(batch)
            if len(batches) == num_rounds:
                break
        return batches, loader.state_dict()

    ranks = run_on_ranks(count, read_rank)
    assert len({len(batches) for batches, _ in ranks}) == 1
    return [batch for batches in zip(*(batches for batches, _ in ranks)) for batch in batches], ranks[0][1]


def test_ranks_share_one_plan_and_resume_on_other_numbers():
    plan = TokenBatchSampler(draw_lengths(400), 4096, global_batch_tokens=4 * 4096, seed=3).plan_epoch()
    for count in (1, 2, 4):
        assert read_on(count)[0] == plan
    first, state = read_on(4, num_rounds=2)
    second, state = read_on(1, state, num_rounds=4)
    third, _ = read_on(2, state)
    assert first + second + third == plan


def test_samples_longer_than_a_batch_are_refused_left_out_or_alone():
    lengths = [5, 90, 7, 3]
    with pytest.raises(DataError, match="sample 1 has 90 tokens"):
        TokenBatchSampler(lengths, 20)
    dropped = TokenBatchSampler(lengths, 20, too_long="drop")
    assert dropped.num_dropped == 1
    assert sorted(index for batch in dropped for index in batch) == [0, 2, 3]
    alone = TokenBatchSampler(lengths, 20, too_long="alone")
    assert [1] in list(alone)
    assert sorted(index for batch in alone for index in batch) == [0, 1, 2, 3]


def test_number_of_samples_can_be_limited():
    assert max(map(len, TokenBatchSampler([1] * 100, 50, max_samples=7))) == 7


@pytest.mark.parametrize(
    ("lengths", "options", "error", "words"),
    [
        ([], {}, DataError, "no lengths"),
        ([3, 0], {}, DataError, "0 tokens"),
        ([3, -1], {}, DataError, "-1 tokens"),
        ([3, 2.5], {}, DataError, "whole numbers"),
        ([3], {"tokens_per_batch": 0}, ConfigError, "tokens_per_batch=0"),
        ([3], {"tokens_per_batch": 2.5}, ConfigError, "tokens_per_batch=2.5"),
        ([3], {"global_batch_tokens": 15}, ConfigError, "multiple of tokens_per_batch=10"),
        ([3], {"global_batch_tokens": 100}, DataError, "1 samples do not fill"),
        ([3], {"max_samples": 0}, ConfigError, "max_samples=0"),
        ([3], {"seed": -2}, ConfigError, "seed=-2"),
        ([3], {"too_long": "cut"}, ConfigError, "'cut'"),
        ([30], {"too_long": "drop"}, DataError, "all 1 samples"),
    ],
)
def test_invalid_arguments_are_refused(lengths, options, error, words):
    with pytest.raises(error, match=words):
        TokenBatchSampler(lengths, **{"tokens_per_batch": 10, **options}).plan_epoch()
