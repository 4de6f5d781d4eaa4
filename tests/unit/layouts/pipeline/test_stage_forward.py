"""What a pipeline remembers of its batches: a bounded number of them, and a warning that says what changes."""

import logging

import torch

from headway.layouts.pipeline.stage_forward import CAPACITY, CallCache, describe_call


def batch(step: int, rows: int = 4) -> dict[str, object]:
    return {"x": torch.zeros(rows, 3), "step": step, "name": "a"}


def test_a_number_that_changes_does_not_grow_it_for_ever(caplog):
    known: CallCache[int] = CallCache("slow")
    always = describe_call({"y": torch.zeros(1)}), None
    known.put(always, -1)
    with caplog.at_level(logging.WARNING, "headway"):
        for step in range(2 * CAPACITY):
            assert known.get((describe_call(batch(step)), None)) is None
            known.put((describe_call(batch(step)), None), step)
            assert known.get(always) == -1, "what is needed all the time stays"
    assert len(known) == CAPACITY
    assert known.get((describe_call(batch(2 * CAPACITY - 1)), None)) == 2 * CAPACITY - 1
    assert known.get((describe_call(batch(CAPACITY)), None)) is None
    assert len(caplog.records) == 1
    told = caplog.records[0].getMessage()
    assert "int (entry 2 of 3 in {x:*,step:.,name:.})" in told


def test_a_signature_tells_values_types_and_nesting_apart():
    batches = [batch(1), batch(2), batch(1, rows=5), {**batch(1), "step": True}, {**batch(1), "step": 1.0}, [batch(1)]]
    batches += [
        {**batch(1), "name": "b"},
        {**batch(1), "x": torch.zeros(4, 3, dtype=torch.int64)},
        {**batch(1), "name": None},
    ]
    assert len({describe_call(each) for each in batches}) == len(batches)
    assert describe_call(batch(1)) == describe_call(batch(1))
