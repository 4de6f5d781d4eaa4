"""Forecasts of layouts with several ranks in one process: sizes, searches and refused layouts."""

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


def net():
    return nn.Sequential(*[Block() for _ in range(DEPTH)])


def forecast(strategy=None, ranks=None, *handlers, **options):
    options = {"device": "cpu", "batch_size": BATCH, "largest": False, "optimizer": "sgd", **options}
    return headway.forecast(
        net, lambda size: torch.zeros(size, WIDTH), loss=lambda out, _: out.sum(), strategy=strategy, ranks=ranks,
        kwargs_handlers=handlers, **options,
    )  # fmt: skip


def test_replicas_hold_their_gradients_once_more_in_buckets():
    alone, replica = forecast(), forecast("ddp", 8)
    assert replica.allocated == alone.allocated + WHOLE
    assert replica.split["buckets"] == WHOLE
    assert "rank 0 of 8 under ddp" in replica.describe()
    assert (replica.strategy, replica.num_ranks, alone.num_ranks) == ("ddp", 8, 1)


def test_gradients_that_are_views_share_memory_with_the_buckets():
    plain = forecast("ddp", 8, batch_size=1)
    views = forecast("ddp", 8, DistributedDataParallelKwargs(gradient_as_bucket_view=True), batch_size=1)
    # One gradient at a time is there before it is copied, and so is what backward needs for it.
    assert plain.allocated - WHOLE <= views.allocated < plain.allocated - WHOLE // 2


def test_buckets_are_rebuilt_in_the_order_of_backward():
    found = forecast("ddp", 8, DistributedDataParallelKwargs(bucket_cap_mb=1), device="a100-40gb")
    assert found.split["buckets"] == WHOLE


def test_shards_are_gathered_unit_by_unit():
    found, kept = forecast("fsdp", 4), forecast("fsdp", 4, ShardingOptions(reshard_after_forward=False))
    assert found.split["weights"] == WHOLE // 4
    unit = WHOLE // DEPTH
    # The unit that computes, and the next one, which has been gathered and not been split yet.
    assert unit <= found.split["gathered weights"] <= 3 * unit
    assert kept.split["gathered weights"] >= WHOLE
    assert kept.allocated >= found.allocated + WHOLE - 3 * unit


@pytest.mark.slow
def test_more_ranks_take_less():
    sizes = [forecast("fsdp", ranks).allocated for ranks in (2, 8, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert forecast("hsdp=2", 8).allocated == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.slow  # a dozen traces
def test_the_largest_batch_and_the_longest_sequence_under_a_layout():
    options = {"device": "a100-40gb", "budget": "3GiB"}
    longest = headway.LongestSequence(lambda size, length: torch.zeros(size, length, WIDTH), multiple=16)
    found = forecast("fsdp", 4, largest=True, longest=longest, **{**options, "batch_size": 64})
    assert found.num_traces <= 12
    at, above = (forecast("fsdp", 4, **options, batch_size=found.largest_batch + more) for more in (0, 1))
    assert at.most <= at.budget < above.most
    assert found.longest_sequence > 16


def test_activations_on_the_host_take_nothing_of_the_card():
    sizes = {
        policy: forecast(recompute=plan, device="a100-40gb", batch_size=16 * BATCH).split["activations"]
        for policy, plan in {
            "kept": False,
            "recomputed": True,
            "offloaded": ActivationCheckpointing(offload=True),
        }.items()
    }
    one = 16 * BATCH * WIDTH * 4
    assert sizes["recomputed"] < sizes["kept"]
    # Each block's input is kept for recomputation; on the host, the one under way alone is on the card.
    assert sizes["recomputed"] - sizes["offloaded"] >= (DEPTH - 2) * one
    spread = forecast(
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
def test_what_cannot_be_forecast_is_reported(error, arguments, options):
    with pytest.raises(error):
        forecast(*arguments, **options)
