"""Test the cache of a pipeline's calls: a limited number of them, and a warning that names the changing value."""

import logging

import torch

from headway.layouts.pipeline.stage_forward import CAPACITY, CallCache, describe_call


def make_batch(step: int, rows: int = 4) -> dict[str, object]:
    return {"x": torch.zeros(rows, 3), "step": step, "name": "a"}


def test_changing_number_does_not_grow_the_cache_without_limit(caplog):
    known: CallCache[int] = CallCache("slow")
    always = describe_call({"y": torch.zeros(1)}), None
    known.put(always, -1)
    with caplog.at_level(logging.WARNING, "headway"):
        for step in range(2 * CAPACITY):
            assert known.get((describe_call(make_batch(step)), None)) is None
            known.put((describe_call(make_batch(step)), None), step)
            assert known.get(always) == -1, "an entry in constant use was removed"
    assert len(known) == CAPACITY
    assert known.get((describe_call(make_batch(2 * CAPACITY - 1)), None)) == 2 * CAPACITY - 1
    assert known.get((describe_call(make_batch(CAPACITY)), None)) is None
    assert len(caplog.records) == 1
    told = caplog.records[0].getMessage()
    assert "int (entry 2 of 3 in {x:*,step:.,name:.})" in told


def test_signature_distinguishes_values_types_and_nesting():
    batches = [
        make_batch(1),
        make_batch(2),
        make_batch(1, rows=5),
        {**make_batch(1), "step": True},
        {**make_batch(1), "step": 1.0},
        [make_batch(1)],
    ]
    batches += [
        {**make_batch(1), "name": "b"},
        {**make_batch(1), "x": torch.zeros(4, 3, dtype=torch.int64)},
        {**make_batch(1), "name": None},
    ]
    assert len({describe_call(each) for each in batches}) == len(batches)
    assert describe_call(make_batch(1)) == describe_call(make_batch(1))
