"""Test flat ranges as boxes: each value occurs once, in its place."""

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from headway.layouts.deepspeed.zero_state import make_piece
from tests.unit.core.checkpoint.amount import EXAMPLES


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(0, 700), max_size=3))
def test_partitions_make_up_the_tensor(shape, cuts):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    places = sorted({0, whole.numel(), *(cut for cut in cuts if cut < whole.numel())})
    made, count = torch.full_like(whole, -1), 0
    for start, stop in itertools.pairwise(places):
        piece = make_piece(shape, whole.reshape(-1)[start:stop], start, True)
        assert len(piece.boxes) <= max(1, 2 * len(shape) - 1)
        for box in piece.boxes:
            made[tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.values.shape))] = box.values
            count += box.values.numel()
    assert torch.equal(made, whole)
    assert count == whole.numel()
