"""A run saved in mid-epoch in one layout continues in any other, on any number of ranks, as if it had not stopped.

The first test saves and loads every layout. `python -m tests.sweep.layouts` covers all pairs.
"""

import pytest

from headway.common.optional import is_available
from tests.sweep import layouts
from tests.sweep.layouts import CLOSE, STOP, UPDATES, Job, check_loaded, measure_difference, reports_other_layout, run


def test_every_layout_continues_from_another(tmp_path):
    """From 8 ranks to 4, 2, 3 and 1: each run saves a checkpoint, blocking or in the background, and the next run continues it."""

    def at(name):
        return tmp_path / name

    eight = [
        Job("pp=2+fsdp=2+tp=2", None, at("pp+fsdp+tp 8"), STOP), Job("fsdp", None, at("fsdp 8"), STOP),
        Job("ddp=2+pp=2+fsdp=2", at("pp+fsdp+tp 8"), at("hsdp+pp 8"), 4),
    ]  # fmt: skip
    four = [
        Job("pp=2+fsdp", at("pp+fsdp+tp 8"), at("pp+fsdp 4"), 4, is_behind=True),
        Job("fsdp", at("fsdp 8"), at("fsdp 4"), 4, is_behind=True), Job("hsdp=2", None, at("hsdp 4"), STOP),
        Job("fsdp+tp=2", at("fsdp 4"), at("fsdp+tp 4"), 5, is_behind=True), Job("ddp", at("hsdp 4"), at("ddp 4"), 4),
        # Some groups of this mesh have the same names and ranks as those of fsdp+tp, which these processes had before.
        Job("pp=2+tp", at("pp+fsdp 4"), at("pp+tp 4"), 6), Job("fsdp", at("fsdp+tp 4")), Job("hsdp=2", at("ddp 4")),
        Job("fsdp+cp=2", at("hsdp 4"), at("fsdp+cp 4"), 4), Job("ddp=2+pp=2", at("fsdp+cp 4"), at("ddp+pp 4"), 5),
        Job("pp=2+cp=2", at("fsdp 4"), at("pp+cp 4"), 5, is_behind=True),
    ]  # fmt: skip
    two = [
        Job("tp", at("fsdp+tp 4"), at("tp 2"), 6, is_behind=True), Job("fsdp", at("hsdp 4"), at("fsdp 2"), 6),
        Job("ddp", at("hsdp+pp 8"), at("ddp 2"), 6), Job("cp", at("ddp+pp 4"), at("cp 2"), 6, is_behind=True),
        Job("pp", at("fsdp+cp 4"), at("pp 2"), 6, is_behind=True),
    ]  # fmt: skip
    three = [Job("fsdp", at("pp 2"), at("fsdp 3"), 7), Job("ddp", at("fsdp 2"), at("ddp 3"), 7, is_behind=True)]
    one = [Job("ddp"), *(Job("ddp", at(name)) for name in ("fsdp 3", "ddp 3", "tp 2", "cp 2", "pp+tp 4", "pp+cp 4"))]
    ran = [(job, num_ranks, result)
           for num_ranks, jobs in ((8, eight), (4, four), (2, two), (3, three), (1, one))
           for job, result in zip(jobs, run(num_ranks, jobs, "gpt"), strict=True)]  # fmt: skip
    whole = next(result for job, num_ranks, result in ran if (job, num_ranks) == (one[0], 1))
    assert len(whole.losses) == UPDATES
    assert max(whole.losses) - min(whole.losses) > 0.1  # the model learns
    saved = {job.save: (job, num_ranks) for job, num_ranks, _ in ran if job.save is not None}
    for job, num_ranks, result in ran:
        before, former = saved.get(job.load, (None, num_ranks))
        begin = 0 if before is None else before.until
        assert len(result.losses) == job.until + job.is_behind - begin
        assert measure_difference(result, whole, begin) < CLOSE, (job, num_ranks, result.losses, whole.losses)
        if job.load is not None:
            check_loaded(job, result)
        if before is not None:
            is_alike = (before.layout, former) == (job.layout, num_ranks)
            is_whole = all(each == "ddp" for each in (before.layout, job.layout))
            assert reports_other_layout(result) == (not is_alike and not is_whole), (before, job, result.differences)
    known = {(cell.layout, cell.num_ranks) for cell in layouts.OWN}
    assert {(job.layout, num_ranks) for job, num_ranks in saved.values()} <= known
    assert {(job.layout, num_ranks) for job, num_ranks, _ in ran} == known


@pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed")
def test_deepspeed_continues_from_fsdp(tmp_path):
    """Uses float32, because DeepSpeed supports no other format with whole precision."""
    first = Job("fsdp", None, tmp_path / "fsdp 2", STOP)
    jobs = [Job(cell.layout, first.save) for cell in layouts.ENGINES]
    result = run(2, [first, *jobs], "gpt, float32")
    whole = run(1, [Job("ddp")], "gpt, float32")[0]
    assert measure_difference(result[0], whole, 0) < layouts.CLOSE_IN_FLOAT32
    for job, each in zip(jobs, result[1:], strict=True):
        assert measure_difference(each, whole) < layouts.CLOSE_IN_FLOAT32
        check_loaded(job, each)


def test_expert_layouts_continue_from_each_other(tmp_path):
    """From expert parallelism with FSDP to `ep`, to pipeline stages, and back."""
    first, second, third = (tmp_path / name for name in ("fsdp+ep 4", "ep 2", "pp 2"))
    result = run(4, [Job("fsdp+ep=2", None, first, STOP, is_behind=True)], "moe")
    jobs = [Job("ep", first, second, 4), Job("pp", second, third, 5)]
    result += run(2, jobs, "moe")
    last = [Job("ddp=2+ep=2", third)]
    result += run(4, last, "moe")
    whole = run(1, [Job("ddp")], "moe")[0]
    for begin, each in zip((0, STOP, 4, 5), result, strict=True):
        assert measure_difference(each, whole, begin) < CLOSE
    for job, each in zip([*jobs, *last], result[1:], strict=True):
        check_loaded(job, each)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "cells"), [("llama", layouts.OWN), ("moe", layouts.MOE)])
def test_all_pairs_of_layouts_continue(name, cells, tmp_path):
    chosen = [cell for cell in cells if cell.num_ranks < 8]  # the command above covers all numbers of ranks
    found = layouts.compare_all_pairs(tmp_path, chosen, name)
    assert len(found) == len(chosen) ** 2
    assert {pair: one for pair, one in found.items() if isinstance(one, str) or one >= CLOSE} == {}
