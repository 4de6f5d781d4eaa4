"""Test forecasts of layouts with several ranks in one process: sizes, searches and refused layouts."""

import pytest
import torch
from torch import nn

import headway
from headway import ActivationCheckpointing
from headway.core.config.parallelism import ShardingOptions
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.errors import ConfigError, UnsupportedError

WIDTH, DEPTH, BATCH = 256, 4, 512
WHOLE = DEPTH * WIDTH * WIDTH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build_net():
    return nn.Sequential(*[Block() for _ in range(DEPTH)])


def forecast_layout(strategy=None, ranks=None, *handlers, **options):
    options = {"device": "cpu", "batch_size": BATCH, "largest": False, "optimizer": "sgd", **options}
    return headway.forecast(
        build_net, lambda size: torch.zeros(size, WIDTH), loss=lambda out, _: out.sum(), strategy=strategy, ranks=ranks,
        kwargs_handlers=handlers, **options,
    )  # fmt: skip


def test_replicas_hold_their_gradients_again_in_buckets():
    alone, replica = forecast_layout(), forecast_layout("ddp", 8)
    assert replica.allocated == alone.allocated + WHOLE
    assert replica.split["buckets"] == WHOLE
    assert "rank 0 of 8 under ddp" in replica.describe()
    assert (replica.strategy, replica.num_ranks, alone.num_ranks) == ("ddp", 8, 1)


class UnequalLayers(nn.Module):
    """Muon updates each weight on one rank: rank 0 gets the first weight, and rank 1 the two others, which are larger together."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, width, bias=False) for width in (640, 384, 384))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)


def test_forecast_names_the_rank_that_it_is_for():
    found = headway.forecast(
        UnequalLayers, lambda size: torch.zeros(size, 64), device="cpu", optimizer="muon", strategy="fsdp", ranks=2, largest=False
    )  # fmt: skip
    assert (found.rank, found.num_ranks) == (1, 2)
    assert "rank 1 of 2 under fsdp" in found.describe()
    assert any("for rank 1 of 2" in caveat for caveat in found.caveats)


def test_gradients_as_views_share_memory_with_the_buckets():
    plain = forecast_layout("ddp", 8, batch_size=1)
    views = forecast_layout("ddp", 8, DistributedDataParallelKwargs(gradient_as_bucket_view=True), batch_size=1)
    # One gradient at a time exists before it is copied, with the tensors that backward needs for it.
    assert plain.allocated - WHOLE <= views.allocated < plain.allocated - WHOLE // 2


def test_buckets_are_rebuilt_in_the_order_of_backward():
    found = forecast_layout("ddp", 8, DistributedDataParallelKwargs(bucket_cap_mb=1), device="a100-40gb")
    assert found.split["buckets"] == WHOLE


def test_shards_are_gathered_unit_by_unit():
    found, kept = forecast_layout("fsdp", 4), forecast_layout("fsdp", 4, ShardingOptions(reshard_after_forward=False))
    assert found.split["weights"] == WHOLE // 4
    unit = WHOLE // DEPTH
    # the unit that computes, and the next one, which has been gathered and not yet been split
    assert unit <= found.split["gathered weights"] <= 3 * unit
    assert kept.split["gathered weights"] >= WHOLE
    assert kept.allocated >= found.allocated + WHOLE - 3 * unit


@pytest.mark.slow
def test_more_ranks_need_less_memory():
    sizes = [forecast_layout("fsdp", ranks).allocated for ranks in (2, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert forecast_layout("hsdp=2", 8).allocated == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.slow  # runs a dozen traces
def test_layout_has_a_largest_batch_and_a_longest_sequence():
    options = {"device": "a100-40gb", "budget": "3GiB"}
    longest = headway.LongestSequence(lambda size, length: torch.zeros(size, length, WIDTH), multiple=16)
    found = forecast_layout("fsdp", 4, largest=True, longest=longest, **{**options, "batch_size": 64})
    assert found.num_traces <= 12
    at, above = (forecast_layout("fsdp", 4, **options, batch_size=found.largest_batch + more) for more in (0, 1))
    assert at.most <= at.budget < above.most
    assert found.longest_sequence > 16


def test_activations_on_the_host_need_no_memory_of_the_gpu():
    sizes = {
        policy: forecast_layout(recompute=plan, device="a100-40gb", batch_size=16 * BATCH).split["activations"]
        for policy, plan in {
            "kept": False,
            "recomputed": True,
            "offloaded": ActivationCheckpointing(offload=True),
        }.items()
    }
    one = 16 * BATCH * WIDTH * 4
    assert sizes["recomputed"] < sizes["kept"]
    # Each block's input is kept for recomputation. With offloading, only the current one is on the GPU.
    assert sizes["recomputed"] - sizes["offloaded"] >= (DEPTH - 2) * one
    spread = forecast_layout(
        "fsdp", 4, ActivationCheckpointing(policy="keep_all", offload=True), device="a100-40gb", batch_size=16 * BATCH
    )
    assert spread.split["activations"] < sizes["kept"] / 2
    assert any("under way" in caveat for caveat in spread.caveats)


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (ConfigError, ("fsdp", None), {}),
        (ConfigError, (None, 8), {}),
        (ConfigError, ("fsdp", 0), {}),
        (ConfigError, ("hsdp=3", 8), {}),
        (ConfigError, ("fsdp", 4, ActivationCheckpointing()), {"recompute": True}),
        (UnsupportedError, ("zero3", 4), {}),
        (UnsupportedError, ("fsdp+cp=2", 4), {}),
        (UnsupportedError, ("pp=2", 2), {}),
        (UnsupportedError, ("fsdp", 4, ShardingOptions(cpu_offload=True)), {}),
    ],
)
def test_unsupported_layouts_are_reported(error, arguments, options):
    with pytest.raises(error):
        forecast_layout(*arguments, **options)
