"""A run saved in mid-epoch under one layout goes on under any other, on any number of ranks, as if it had never been stopped.

Every layout is saved and loaded here; `python -m tests.sweep.layouts` is all pairs.
"""

from headway.common.optional import available
from tests.sweep.layouts import CLOSE, ENGINES, OWN, STOP, UPDATES, Job, compared, names_layouts, run


def test_every_layout_goes_on_from_another(tmp_path):
    """From 8 ranks to 4, to 2, to 3, to 1: each run saves where the next one goes on, in step or behind the loop."""

    def at(name):
        return tmp_path / name

    eight = [Job("pp=2+fsdp=2+tp=2", None, at("pp+fsdp+tp 8"), STOP)]
    four = [
        Job("pp=2+fsdp", at("pp+fsdp+tp 8"), at("pp+fsdp 4"), 4, is_behind=True),
        Job("pp=2+tp", at("pp+fsdp 4"), at("pp+tp 4"), 6),
        Job("fsdp", None, at("fsdp 4"), STOP, is_behind=True), Job("hsdp=2", None, at("hsdp 4"), STOP),
        Job("fsdp+tp=2", at("fsdp 4"), at("fsdp+tp 4"), 4, is_behind=True), Job("ddp", at("hsdp 4"), at("ddp 4"), 4),
        Job("fsdp", at("fsdp+tp 4")), Job("hsdp=2", at("ddp 4")),
        Job("fsdp+cp=2", at("hsdp 4"), at("fsdp+cp 4"), 4), Job("ddp=2+pp=2", at("fsdp+cp 4"), at("ddp+pp 4"), 5),
    ]  # fmt: skip
    two = [
        Job("tp", at("fsdp+tp 4"), at("tp 2"), 6, is_behind=True), Job("fsdp", at("hsdp 4"), at("fsdp 2"), 6),
        Job("ddp", at("pp+fsdp+tp 8"), at("ddp 2"), 6), Job("cp", at("ddp+pp 4"), at("cp 2"), 6, is_behind=True),
        Job("pp", at("fsdp+cp 4"), at("pp 2"), 6, is_behind=True),
    ]  # fmt: skip
    if available("deepspeed"):  # else test_deepspeed_saves.py says that it is skipped, and why
        two += [Job(cell.layout, at("fsdp 4")) for cell in ENGINES]
    three = [Job("fsdp", at("pp 2"), at("fsdp 3"), 7), Job("ddp", at("fsdp 2"), at("ddp 3"), 7, is_behind=True)]
    one = [Job("ddp"), *(Job("ddp", at(name)) for name in ("fsdp 3", "ddp 3", "tp 2", "cp 2", "pp+tp 4"))]
    ran = [(job, num_ranks, told)
           for num_ranks, jobs in ((8, eight), (4, four), (2, two), (3, three), (1, one))
           for job, told in zip(jobs, run(num_ranks, jobs, is_small=True), strict=True)]  # fmt: skip
    whole = next(told for job, num_ranks, told in ran if (job, num_ranks) == (one[0], 1))
    assert len(whole.losses) == UPDATES
    assert max(whole.losses) - min(whole.losses) > 0.1  # it learns
    saved = {job.save: (job, num_ranks) for job, num_ranks, _ in ran if job.save is not None}
    for job, num_ranks, told in ran:
        before, former = saved.get(job.load, (None, num_ranks))
        begin = 0 if before is None else before.until
        assert len(told.losses) == job.until + job.is_behind - begin
        assert compared(told, whole, begin) < CLOSE, (job, num_ranks, told.losses, whole.losses)
        if before is not None and not job.layout.startswith("zero"):
            is_alike = (before.layout, former) == (job.layout, num_ranks)
            is_whole = all(each == "ddp" for each in (before.layout, job.layout))
            assert names_layouts(told) == (not is_alike and not is_whole), (before, job, told.differences)
    known = {(cell.layout, cell.num_ranks) for cell in OWN}
    assert {(job.layout, num_ranks) for job, num_ranks in saved.values()} <= known
    assert {(job.layout, num_ranks) for job, num_ranks, _ in ran if not job.layout.startswith("zero")} == known
