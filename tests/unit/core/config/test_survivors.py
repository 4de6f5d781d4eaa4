"""The layout of a run that has lost ranks: all remaining ranks take part, with no larger part of the model if
possible.
"""

import json

import pytest

from headway.core.config import layout_choice
from headway.core.config.engines import EngineOptions
from headway.core.config.layout_choice import RequestedLayout
from headway.core.config.mesh import Layout, parse_layout
from headway.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "launched", "left", "wanted"),
    [
        ("ddp", 8, 7, Layout(replicate=7)), ("ddp=4", 4, 3, Layout(replicate=3)),
        ("fsdp", 8, 7, Layout(shard=7)), ("fsdp=8", 8, 6, Layout(shard=6)), ("zero3", 4, 3, Layout(shard=3)),
        ("hsdp=2", 8, 6, Layout(replicate=3, shard=2)), ("hsdp=2", 4, 3, Layout(shard=3)),
        ("hsdp=4", 8, 6, Layout(shard=6)), ("hsdp=4", 16, 15, Layout(replicate=3, shard=5)),
        ("hsdp=4", 8, 2, Layout(shard=2)), ("ddp=2+fsdp=4", 8, 7, Layout(shard=7)),
        ("fsdp+tp=2", 8, 6, Layout(shard=3, tp=2)), ("fsdp+tp=2", 8, 7, Layout(shard=7)),
        ("fsdp+tp=2", 4, 2, Layout(tp=2)), ("fsdp+tp=2", 4, 1, Layout()), ("fsdp+tp=4", 16, 6, Layout(shard=3, tp=2)),
        ("tp", 4, 3, Layout(shard=3)), ("tp", 4, 2, Layout(tp=2)), ("tp", 8, 6, Layout(shard=3, tp=2)),
        ("tp=4", 4, 3, Layout(shard=3)), ("ddp+tp=4", 8, 6, Layout(replicate=1, shard=3, tp=2)),
        ("pp", 4, 2, Layout(pp=2)), ("pp=4", 4, 2, Layout(shard=2)), ("ddp+pp=2", 8, 6, Layout(replicate=3, pp=2)),
        ("ddp=2+pp=4", 8, 6, Layout(shard=6)), ("fsdp+cp=2", 8, 6, Layout(shard=3, cp=2)), ("cp=2", 2, 1, Layout()),
    ],
)  # fmt: skip
def test_the_layout_that_fits_the_remaining_ranks(text, launched, left, wanted):
    found = layout_choice.shrink_layout(parse_layout(text), launched, left)
    assert found == wanted
    assert found.num_ranks == left


@pytest.mark.parametrize("text", ["hsdp=4", "ddp=4+fsdp=4+tp=2", "hsdp=8+tp=2", "tp=16", "ddp+tp=8", "ddp=32"])
def test_all_ranks_take_part_and_none_holds_more_than_it_must(text):
    launched = 32 if "ddp=" in text else 16
    whole = parse_layout(text).resolve(launched)
    for left in range(1, launched):
        found = layout_choice.shrink_layout(parse_layout(text), launched, left)
        assert found.num_ranks == left
        assert whole.tp % found.tp == 0
        parts = whole.shard * whole.tp
        assert found.shard * found.tp >= min(parts, left) or found.shard * found.tp == left


def test_a_bare_hsdp_follows_the_machines_that_are_left():
    assert layout_choice.shrink_layout(parse_layout("hsdp"), 12, 8, 4) == Layout(replicate=2, shard=4)
    assert layout_choice.shrink_layout(parse_layout("hsdp"), 12, 4, 4) == Layout(shard=4)


def test_only_a_run_that_has_lost_ranks_is_fitted(monkeypatch, caplog):
    def decide(num_ranks):
        return RequestedLayout("hsdp=2", "train.py:1").resolve(EngineOptions(), num_ranks, num_ranks).layout

    with pytest.raises(ConfigError, match="hsdp=2"):
        decide(3)
    payload = {"version": 1, "settings": {}, "num_processes": 4, "min_processes": 2, "force": False}
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(payload))
    assert decide(4) == Layout(replicate=2, shard=2)
    assert not caplog.records
    assert decide(3) == Layout(shard=3)
    assert "layout hsdp=2 of 4 ranks does not fit 3: the run continues with fsdp=3 (3 shards)" in caplog.text
    with pytest.raises(ConfigError, match="hsdp=2"):
        decide(5)
