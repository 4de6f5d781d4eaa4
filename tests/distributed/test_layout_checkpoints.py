"""A run saved in mid-epoch under one layout goes on under any other, on any number of ranks, as if it had never been stopped.

Every layout is saved and loaded here; `python -m tests.sweep.layouts` is all pairs.
"""

import pytest

from headway.common.optional import is_available
from tests.sweep import layouts
from tests.sweep.layouts import CLOSE, STOP, UPDATES, Job, check_loaded, compared, names_layouts, run


def test_every_layout_goes_on_from_another(tmp_path):
    """From 8 ranks to 4, to 2, to 3, to 1: each run saves where the next one goes on, in step or behind the loop."""

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
        # Parts of its mesh have the names and ranks of those of fsdp+tp, which these processes have had before.
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
    ran = [(job, num_ranks, told)
           for num_ranks, jobs in ((8, eight), (4, four), (2, two), (3, three), (1, one))
           for job, told in zip(jobs, run(num_ranks, jobs, "gpt"), strict=True)]  # fmt: skip
    whole = next(told for job, num_ranks, told in ran if (job, num_ranks) == (one[0], 1))
    assert len(whole.losses) == UPDATES
    assert max(whole.losses) - min(whole.losses) > 0.1  # it learns
    saved = {job.save: (job, num_ranks) for job, num_ranks, _ in ran if job.save is not None}
    for job, num_ranks, told in ran:
        before, former = saved.get(job.load, (None, num_ranks))
        begin = 0 if before is None else before.until
        assert len(told.losses) == job.until + job.is_behind - begin
        assert compared(told, whole, begin) < CLOSE, (job, num_ranks, told.losses, whole.losses)
        if job.load is not None:
            check_loaded(job, told)
        if before is not None:
            is_alike = (before.layout, former) == (job.layout, num_ranks)
            is_whole = all(each == "ddp" for each in (before.layout, job.layout))
            assert names_layouts(told) == (not is_alike and not is_whole), (before, job, told.differences)
    known = {(cell.layout, cell.num_ranks) for cell in layouts.OWN}
    assert {(job.layout, num_ranks) for job, num_ranks in saved.values()} <= known
    assert {(job.layout, num_ranks) for job, num_ranks, _ in ran} == known


@pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed: pip install deepspeed")
def test_zero_goes_on_from_shards(tmp_path):
    """In float32, as DeepSpeed knows no other whole format."""
    first = Job("fsdp", None, tmp_path / "fsdp 2", STOP)
    jobs = [Job(cell.layout, first.save) for cell in layouts.ENGINES]
    told = run(2, [first, *jobs], "gpt, float32")
    whole = run(1, [Job("ddp")], "gpt, float32")[0]
    assert compared(told[0], whole, 0) < layouts.CLOSE_IN_FLOAT32
    for job, each in zip(jobs, told[1:], strict=True):
        assert compared(each, whole) < layouts.CLOSE_IN_FLOAT32
        check_loaded(job, each)


def test_experts_go_into_and_out_of_their_layouts(tmp_path):
    """From experts in groups to whole ones, to stages, and back."""
    first, second, third = (tmp_path / name for name in ("fsdp+ep 4", "ep 2", "pp 2"))
    told = run(4, [Job("fsdp+ep=2", None, first, STOP, is_behind=True)], "moe")
    jobs = [Job("ep", first, second, 4), Job("pp", second, third, 5)]
    told += run(2, jobs, "moe")
    last = [Job("ddp=2+ep=2", third)]
    told += run(4, last, "moe")
    whole = run(1, [Job("ddp")], "moe")[0]
    for begin, each in zip((0, STOP, 4, 5), told, strict=True):
        assert compared(each, whole, begin) < CLOSE
    for job, each in zip([*jobs, *last], told[1:], strict=True):
        check_loaded(job, each)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "cells"), [("llama", layouts.OWN), ("moe", layouts.MOE)])
def test_every_layout_goes_on_from_every_other(name, cells, tmp_path):
    chosen = [cell for cell in cells if cell.num_ranks < 8]  # the command above takes all of them
    found = layouts.matrix(tmp_path, chosen, name)
    assert len(found) == len(chosen) ** 2
    assert {pair: one for pair, one in found.items() if isinstance(one, str) or one >= CLOSE} == {}
