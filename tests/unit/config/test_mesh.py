"""Layouts: what is written, and what it comes to on a number of ranks."""

import pytest

from headway.config.mesh import Layout, parse
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_ranks", "wanted"),
    [
        ("ddp", 4, Layout(replicate=4)),
        ("fsdp", 4, Layout(shard=4)),
        ("hsdp=2", 8, Layout(replicate=4, shard=2)),
        ("FSDP + tp=2", 8, Layout(shard=4, tp=2)),
        ("ddp=2+fsdp=4+tp=2", 16, Layout(replicate=2, shard=4, tp=2)),
        ("pp=2+ddp", 4, Layout(pp=2, replicate=2)),
        ("ddp", 1, Layout()),
    ],
)
def test_what_is_written_on_so_many_ranks(text, num_ranks, wanted):
    assert parse(text).resolve(num_ranks) == wanted
    assert wanted.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("text", "num_ranks", "told"),
    [
        ("fsdp=4", 8, "takes 4 ranks, but the run has 8"),
        ("fsdp+tp=3", 8, "takes 3 ranks at a time"),
        ("zero", 2, "'zero' is unknown"),
        ("fsdp+tp", 4, "more than one size open"),
        ("hsdp", 4, "more than one size open"),
        ("fsdp=0", 2, "needs a number of ranks"),
        ("fsdp=²", 2, "needs a number of ranks"),
        ("fsdp=2+hsdp=2", 4, "twice"),
        ("", 1, "unknown"),
    ],
)
def test_what_cannot_be(text, num_ranks, told):
    with pytest.raises(ConfigError, match=told):
        parse(text).resolve(num_ranks)


def test_the_axes_in_their_order_and_who_reads_what():
    layout = Layout(replicate=2, shard=4, tp=2)
    assert list(layout.sizes.items()) == [("replicate", 2), ("shard", 4), ("tp", 2)]
    assert layout.num_data_shards == 8
    assert not layout.is_replicas_only
    assert Layout(replicate=3).is_replicas_only
