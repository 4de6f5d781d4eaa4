"""Test that plans of models with repeated blocks equal those of running all blocks."""

from functools import partial

import pytest
import torch
from torch import nn

from headway import ActivationCheckpointing, ShardingOptions
from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import parse_layout
from headway.forecasting.device.devices import find_device
from headway.planning.dry_run.rank_update import dry_run_rank
from headway.planning.dry_run.repeated import can_repeat_blocks, dry_run_repeated
from headway.planning.plan import plan
from tests.unit.planning.models import Chain, chain_loss, llama_config, loss, tied

DEPTH = 17


def deep_llama():
    from transformers import LlamaForCausalLM

    from headway.forecasting.tracing.attention_masks import skip_causal_mask

    return skip_causal_mask(LlamaForCausalLM(llama_config(num_hidden_layers=DEPTH)))


def run_both(make, strategy, num_ranks, step, options=None, precision="no"):
    """Return the dry run from a few blocks, and that of all blocks."""
    given = step, torch.optim.AdamW, precision, options or EngineOptions(), 8, None, find_device("h100")

    def run(make):
        return dry_run_rank(make, parse_layout(strategy).resolve(num_ranks), 0, *given)

    return dry_run_repeated(make, run), run(make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        pytest.param("ddp", 4, marks=pytest.mark.matrix),
        ("fsdp", 8),
        pytest.param("hsdp=2", 4, marks=pytest.mark.matrix),
        pytest.param("tp", 2, marks=pytest.mark.matrix),
        pytest.param("fsdp+tp=2", 4, marks=pytest.mark.matrix),
        pytest.param("fsdp+cp=2", 4, marks=pytest.mark.matrix),
    ],
)
def test_results_equal_those_of_running_all_blocks(strategy, num_ranks):
    found, whole = run_both(deep_llama, strategy, num_ranks, loss, precision="bf16")
    assert found == whole
    assert (found.peak, found.buckets) == (whole.peak, whole.buckets)
    assert found.trace.phases == whole.trace.phases


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(checkpointing=ActivationCheckpointing()),
        pytest.param(
            EngineOptions(checkpointing=ActivationCheckpointing(policy="keep_matmul")), marks=pytest.mark.matrix
        ),
        pytest.param(EngineOptions(sharding=ShardingOptions(reshard_after_forward=False)), marks=pytest.mark.matrix),
    ],
)
def test_options_keep_the_results_equal(options):
    found, whole = run_both(deep_llama, "fsdp", 8, loss, options)
    assert found == whole
    assert found.peak == whole.peak


@pytest.mark.slow
def test_list_that_is_the_model_itself():
    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(DEPTH)))

    found, whole = run_both(make, "fsdp", 4, chain_loss)
    assert found == whole
    assert [piece.name for piece in found.parameters] == [name for name, _ in make().named_parameters()]


class Widening(Chain):
    """Model whose activations grow with the index of the block, so that no block repeats another."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x[:5])])
        return x


@pytest.mark.slow
def test_different_blocks_are_run_whole():
    assert run_both(partial(Widening, 24, DEPTH), "fsdp", 4, chain_loss)[0] is None
    assert run_both(tied, "fsdp", 4, loss)[0] is None  # only two blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(checkpointing=ActivationCheckpointing(every=8)),
        pytest.param(EngineOptions(sharding=ShardingOptions(forward_prefetch=4)), marks=pytest.mark.matrix),
        pytest.param(EngineOptions(sharding=ShardingOptions(min_num_params=2000)), marks=pytest.mark.matrix),
    ],
)
def test_options_that_count_blocks_are_run_whole(options):
    assert not can_repeat_blocks(options)
    handlers = [each for each in (options.checkpointing, options.sharding) if each is not None]
    make = partial(Chain, depth=DEPTH)
    found = plan(make, "fsdp", 8, step=chain_loss, kwargs_handlers=handlers)
    whole = dry_run_rank(
        make, found.layout, 0, chain_loss, torch.optim.AdamW, options=options, device=find_device("h100")
    )
    assert (found.activations, found.flops) == (whole.activations, sum(whole.flops.values()))
