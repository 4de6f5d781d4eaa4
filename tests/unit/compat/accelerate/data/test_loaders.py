"""Test that sample orders, random draws and ends of loaders under `import accelerate` equal those of Accelerate."""

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from headway.compat.accelerate.data.loaders import AccelerateRules, DataLoaderDispatcher, SeededShuffle
from headway.core.config.run import DataLoaderConfiguration
from headway.core.data.build import prepare_loader
from headway.core.data.loader import LoaderEvents
from headway.core.data.loading_rules import LoadingRules
from headway.core.data.sampling.sampler_order import SamplerOrder
from headway.core.data.sampling.shard import ShardIndex
from tests.unit.core.data.fakes import Numbers, Stream, run_on_ranks


def prepare(loader, shard=ShardIndex(0, 1), collectives=None, rules=None, device=None, **config):
    return prepare_loader(
        loader, shard=shard, config=DataLoaderConfiguration(**config), device=device, collectives=collectives,
        events=LoaderEvents(), seed=99, rules=rules or AccelerateRules(),
    )  # fmt: skip


def read_epoch(loader):
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize(
    "options", [{}, {"replacement": True}, {"num_samples": 5}, {"num_samples": 30, "replacement": True}], ids=str
)
def test_seedable_order_equals_that_of_accelerates_sampler(options):
    theirs = SeedableRandomSampler(range(12), data_seed=3, **options)
    ours = SeededShuffle(RandomSampler(range(12), **options), 3)
    assert len(ours) == len(theirs)
    for number in range(3):
        theirs.set_epoch(number)
        assert list(map(int, ours.draw_order(number))) == list(theirs)


def test_seedable_order_starts_with_data_seed_or_torchs_seed():
    torch.manual_seed(4)
    loader = DataLoader(Numbers(12), batch_size=4, shuffle=True)
    by_torch, given = (
        prepare(loader, use_seedable_sampler=True),
        prepare(loader, use_seedable_sampler=True, data_seed=8),
    )
    for prepared, seed in ((by_torch, 4), (given, 8)):
        assert read_epoch(prepared) == torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        assert read_epoch(prepared) == torch.randperm(12, generator=torch.Generator().manual_seed(seed + 1)).tolist()


def test_seedable_order_advances_the_global_rng_like_a_loader_without_shuffling():
    torch.manual_seed(4)
    read_epoch(DataLoader(Numbers(8), batch_size=4))
    expected = torch.rand(1)
    torch.manual_seed(4)
    read_epoch(prepare(DataLoader(Numbers(8), batch_size=4, shuffle=True), use_seedable_sampler=True))
    assert torch.equal(torch.rand(1), expected)


def test_resumed_loader_keeps_the_seed_of_the_run_it_resumes():
    torch.manual_seed(4)
    first = prepare(DataLoader(Numbers(12), batch_size=4, shuffle=True), use_seedable_sampler=True)
    read_epoch(first)
    passing = iter(first)
    begun = next(passing).tolist()
    state = first.state_dict()
    rest = [row for batch in passing for row in batch.tolist()]
    torch.manual_seed(5)
    other = prepare(DataLoader(Numbers(12), batch_size=4, shuffle=True), use_seedable_sampler=True)
    other.load_state_dict(state)
    assert read_epoch(other) == rest
    assert sorted(begun + rest) == list(range(12))
    assert read_epoch(other) == read_epoch(first)


def test_ranks_shuffle_with_one_generator_seeded_in_prepare():
    torch.manual_seed(4)
    possible = []
    for _ in range(2):  # ranks are threads here and share one RNG, so either may draw first
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        sampler = RandomSampler(range(8), generator=generator)
        possible.append([list(sampler) for _ in range(2)])

    def run_rank(rank, collectives):
        loader = DataLoader(Numbers(8), batch_size=4, shuffle=True)
        prepared = prepare(loader, ShardIndex(rank, 2), collectives, use_seedable_sampler=False)
        return [read_epoch(prepared) for _ in range(2)]

    torch.manual_seed(4)
    first, second = run_on_ranks(2, run_rank)
    assert [one + other for one, other in zip(first, second)] in possible


def test_other_samplers_draw_from_the_current_rng_state():
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    sampler = SubsetRandomSampler(range(9))
    torch.manual_seed(4)
    expected = read_epoch(DataLoader(Numbers(9), batch_size=3, sampler=sampler))
    torch.manual_seed(4)
    prepared = prepare(DataLoader(Numbers(9), batch_size=3, sampler=sampler), use_seedable_sampler=True)
    assert isinstance(prepared._feed.order, SamplerOrder)
    assert read_epoch(prepared) == expected
    assert not AccelerateRules().has_seeded_order(config)


@pytest.mark.parametrize(("rules", "num_ahead"), [(AccelerateRules(), 1), (LoadingRules(), 0)], ids=["theirs", "ours"])
def test_accelerates_rules_fetch_one_batch_ahead(rules, num_ahead):
    data = Numbers(6)
    for number, _ in enumerate(prepare(DataLoader(data, batch_size=2), rules=rules), start=1):
        assert len(data.fetched) == min(6, 2 * (number + num_ahead))


@pytest.mark.parametrize(
    ("is_dispatched", "expected"), [(None, [[8, 9, 10], [11, 12, 0]]), (False, [[8, 9, 10, 11], [12, 0, 1, 2]])]
)
def test_stream_ends_with_equal_batches_if_dispatched(is_dispatched, expected):
    def run_rank(rank, collectives):
        loader = DataLoader(Stream(13), batch_size=4)
        device = torch.device("cpu")  # Accelerate dispatches only if a device is given
        prepared = prepare(loader, ShardIndex(rank, 2), collectives, device=device, dispatch_batches=is_dispatched)
        return [batch.tolist() for batch in prepared][-1]

    assert run_on_ranks(2, run_rank) == expected


def test_dispatcher_built_by_hand_accepts_split_batches():
    loader = DataLoaderDispatcher(list(range(8)), split_batches=True, batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
