"""Test the positions of a DTensor's parts, compared with torch's own computation."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from headway.core.weights.dtensor_boxes import compute_ranges
from headway.core.weights.export import split_ties
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, get_local_part, is_sharded
from tests.unit.core.checkpoint.amount import EXAMPLES


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 60), st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 5)), st.integers(1, 6)), max_size=3))
def test_dim_is_split_like_by_torch(length, cuts):
    found = compute_ranges(length, cuts)
    placements = [Shard(0) if factor is None else _StridedShard(0, split_factor=factor) for factor, _ in cuts]
    assert sorted(place for runs in found.values() for start, stop in runs for place in range(start, stop)) == list(
        range(length)
    )
    for coordinate, runs in found.items():
        size, offset = _compute_local_shape_and_global_offset(
            (length,), [num for _, num in cuts], list(coordinate), placements
        )
        assert size == (sum(stop - start for start, stop in runs),)
        assert not runs or offset == (runs[0][0],)


def test_equal_runs_and_writers_are_counted():
    split = TensorSplit(((4, 4, 4, 2), (3,)), (0, 2, 4, 6, 1, 3, 5, 9))
    assert split.size_runs == [[(4, 3), (2, 1)], [(3, 1)]]
    assert split.writer_progressions == [(0, 2, 4), (1, 2, 3), (9, 1, 1)]
    assert split.last_box_by_writer[9] == 7
    assert split.positions_by_start == [{0: 0, 4: 1, 8: 2, 12: 3}, {0: 0}]
    assert TensorSplit(((1, 1, 1),), (5, 3, 3)).writer_progressions == [(5, 1, 1), (3, 1, 1), (3, 1, 1)]


def test_pieces_are_tied_by_their_memory():
    memory = torch.arange(8.0)
    one, other = (ShardPiece((16,), torch.float32, (TensorBox((0,), memory[:], True),)) for _ in range(2))
    apart = ShardPiece((16,), torch.float32, (TensorBox((0,), memory.clone(), True),))
    kept, tied = split_ties([("a", one), ("b", apart), ("c", other), ("d", memory), ("e", memory.view(2, 4))])
    assert tied == {"c": "a"}
    assert list(kept) == ["a", "b", "d", "e"]
    empty = [ShardPiece((16,), torch.float32, ()) for _ in range(2)]
    assert split_ties([("a", empty[0]), ("b", empty[1])])[1] == {}
    assert is_sharded(one)
    assert not is_sharded(memory)
    assert get_local_part(empty[0]).numel() == 0
