"""Test stripes of a shuffled order: each part of a step reads its own blocks, and every record occurs once."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from headway import ShardedDataset
from headway.errors import ConfigError, DataError
from headway.language_data.shards.order import ShardOrder, Stripes
from tests.unit.language_data.shards.shard_files import make_records, write_shard

STEP = 24


@pytest.mark.parametrize("num_stripes", [2, 4, 8])
@pytest.mark.parametrize("buffer_size", [1, 500])
def test_machines_read_different_blocks(num_stripes: int, buffer_size: int) -> None:
    counts = numpy.random.default_rng(0).integers(20, 60, 200)
    order = ShardOrder(counts, numpy.arange(200), 3, buffer_size, Stripes(num_stripes, STEP))
    positions = numpy.arange(len(order))
    for epoch in range(2):
        places = order.locate(positions, epoch)
        assert len({*zip(places.blocks.tolist(), places.indices.tolist())}) == len(order)
        machines = positions % STEP // (STEP // 2)
        num_fetched = sum(len(numpy.unique(places.blocks[machines == machine])) for machine in (0, 1))
        # 400 blocks are read without stripes. More than 200 are read because windows cross the bounds of stripes.
        assert num_fetched <= 200 + 4 * num_stripes + 500 // 20


def test_order_of_a_part_does_not_depend_on_other_positions() -> None:
    order = ShardOrder(numpy.full(30, 10), numpy.arange(30), 3, 50, Stripes(4, STEP))
    whole = order.locate(numpy.arange(300), 0)
    part = order.locate(numpy.array([299, 7, 100]), 0)
    assert part.blocks.tolist() == whole.blocks[[299, 7, 100]].tolist()
    assert part.indices.tolist() == whole.indices[[299, 7, 100]].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stripes": 0, "samples_per_step": 4}, "num_stripes=0 must be a whole number"),
        ({"num_stripes": 2, "samples_per_step": 4, "shuffle": False}, "give shuffle=True, too"),
        ({"num_stripes": 2}, "needs samples_per_step="),
        ({"num_stripes": 3, "samples_per_step": 4}, "as a multiple of 3; it is 4"),
    ],
)
def test_invalid_stripes_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_shard(tmp_path / "a.jsonl", make_records(4))
    with pytest.raises(ConfigError, match=message):
        ShardedDataset(tmp_path / "a.jsonl", **{"shuffle": True, "cache_dir": tmp_path / "cache"} | options)


def test_position_from_other_stripes_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.jsonl", make_records(16))
    options: dict[str, Any] = {"shuffle": True, "cache_dir": tmp_path / "cache"}
    plain = ShardedDataset(tmp_path / "a.jsonl", **options)
    striped = ShardedDataset(tmp_path / "a.jsonl", num_stripes=2, samples_per_step=4, **options)
    with pytest.raises(DataError, match="num_stripes= or samples_per_step= have changed"):
        striped.load_state_dict(plain.state_dict())
