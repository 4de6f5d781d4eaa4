"""Test where a model is cut into stages, and which stages hold which parameters."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headway import PipelineOptions
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import SCHEDULES
from headway.errors import ConfigError, PrepareError
from headway.layouts.pipeline.plain_calls import PlainCalls
from headway.layouts.pipeline.runner import PipelineBatch
from headway.layouts.pipeline.stages import find_stages
from tests.distributed.layouts import GPT


def find_cut(num_stages, model=None, **options):
    return find_stages(model or GPT(num_blocks=5), num_stages, PipelineOptions(**options))


@pytest.mark.parametrize(
    ("num_stages", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (4, [1, 2, 1, 1]), (5, [1, 1, 1, 1, 1])]
)
def test_stages_have_equally_many_blocks_and_the_last_has_no_more(num_stages, sizes):
    bounds = find_cut(num_stages).bounds
    assert [b - a for a, b in pairwise(bounds)] == sizes


def test_modules_beside_the_blocks_are_on_the_first_or_the_last_stage():
    assert find_cut(2).outer_modules == {
        "tokens": frozenset({0}),
        "positions": frozenset({0}),
        "norm": frozenset({1}),
        "head": frozenset({1}),
    }
    moved = find_cut(2, first=("norm",), last=("norm", "positions")).outer_modules
    assert moved["norm"] == {0, 1}
    assert moved["positions"] == {1}


def test_parameters_are_held_by_the_stages_that_use_them():
    model = GPT(num_blocks=3)
    model.scale = nn.Parameter(torch.ones(1))
    holders = find_cut(3, model).map_stages(model)
    by_name = {name: set(holders[id(p)]) for name, p in model.named_parameters()}
    assert by_name["tokens.weight"] == {0, 2}  # head and embedding share the weight
    assert by_name["positions.weight"] == {0}
    assert by_name["blocks.1.up.weight"] == {1}
    assert by_name["norm.weight"] == {2}
    assert by_name["scale"] == {0, 1, 2}


def test_stages_may_be_given_by_name():
    assert find_cut(3, split=("blocks.1", "blocks.4")).bounds == (0, 1, 4, 5)
    with pytest.raises(ConfigError, match=r"names 'blocks.9'; the blocks are blocks.0, blocks.1"):
        find_cut(2, split="blocks.9")
    with pytest.raises(ConfigError, match="the first block of each of stages 2 to 3, in order"):
        find_cut(3, split=("blocks.4", "blocks.1"))
    with pytest.raises(ConfigError, match=r"names 'blocks'; the modules with parameters outside of the blocks"):
        find_cut(2, last="blocks")


def test_too_few_blocks_are_refused():
    with pytest.raises(PrepareError, match=r"has 5 repeated blocks .* too few for 6 stages"):
        find_cut(6)
    with pytest.raises(PrepareError, match="has no repeated blocks"):
        find_cut(2, nn.Linear(2, 2))


def test_invalid_options_are_refused():
    with pytest.raises(ConfigError, match="allowed: gpipe, 1f1b, interleaved, zero_bubble, zbv"):
        PipelineOptions(schedule="pipedream")
    with pytest.raises(ConfigError, match="needs a schedule with several stages per rank"):
        PipelineOptions(schedule="1f1b", stages_per_rank=2)
    with pytest.raises(ConfigError, match="zbv has exactly 2"):
        PipelineOptions(schedule="zbv", stages_per_rank=3)
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        PipelineOptions(num_microbatches=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_has_its_number_of_stages(schedule):
    options = PipelineOptions(schedule=schedule)
    ranks = [options.find_rank(stage, 3) for stage in range(3 * options.num_per_rank)]
    assert sorted(ranks) == sorted([0, 1, 2] * options.num_per_rank)
    assert ranks == ([0, 1, 2, 2, 1, 0] if schedule == "zbv" else [0, 1, 2] * options.num_per_rank)


def test_stages_are_consecutive_ranks():
    assert Layout(pp=2, shard=2).stages == [range(2), range(2, 4)]
    assert [list(group) for group in Layout(pp=2, replicate=2).list_groups("pp")] == [[0, 2], [1, 3]]


def test_sparse_gradient_of_a_stages_output_is_split():
    joined = torch.ones(2, 3, requires_grad=True)
    whole = torch.gather(joined, 1, torch.tensor([[0], [2]]), sparse_grad=True)
    stage = SimpleNamespace(outputs={0: [joined]}, output_grads={})
    pending = SimpleNamespace(outputs=[whole], block_outputs=[joined])
    PlainCalls._split_gradients(stage, PipelineBatch({}, 1, []), pending, [torch.ones(2, 1)])
    assert stage.output_grads[0][0].to_dense().tolist() == [[1, 0, 0], [0, 0, 1]]


def test_container_without_a_forward_is_placed_by_its_children():
    model = GPT(num_blocks=3)
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    outer_modules = find_cut(2, model).outer_modules
    assert "heads" not in outer_modules
    assert outer_modules["heads.a"] == outer_modules["heads.b"] == {1}
    assert find_cut(2, model, first=("heads",)).outer_modules["heads.b"] == {0}
