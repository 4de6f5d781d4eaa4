"""Test the diagnosis of hangs from views of ranks, and its report."""

import dataclasses
import json
import math
import sysconfig

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.common.callsite import Frame
from headway.core.checkpoint.saving import writer
from headway.core.runtime import heartbeat_file
from headway.launch.watch import judge as hang
from headway.launch.watch import report
from headway.launch.watch.judge import diagnose_hang
from headway.launch.watch.views import CollectiveCall, RankView, decode_view, encode_view

WRITER = (Frame(writer.__file__, 9, "join"), Frame("/u/t.py", 7, "main"))
SITE, STDLIB = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")


def make_inside(rank, age, *, number=5, operation="all_reduce", group="0", **more):
    call = CollectiveCall(group, number, operation, age, more.pop("members", None))
    return RankView(rank, **{"beat_age": 0.5, "state": "S", "calls": (call,), **more})


def make_outside(rank, *, number=4, group="0", **more):
    return RankView(
        rank, **{"beat_age": 0.5, "state": "R", "calls": (CollectiveCall(group, number, "all_reduce"),), **more}
    )


def list_missing(views, timeout=10.0):
    verdict = diagnose_hang(views, timeout)
    return None if verdict is None else [view.rank for view in verdict.missing]


def test_rank_that_does_not_arrive_is_missing():
    assert list_missing([make_inside(0, 11), make_outside(1), make_inside(2, 3)]) == [1]
    verdict = diagnose_hang([make_inside(0, 11), make_outside(1), make_inside(2, 3)], 10)
    assert verdict is not None
    assert [view.rank for view in verdict.waiting] == [0, 2]


@pytest.mark.parametrize(
    "views",
    [
        [make_outside(0), make_outside(1)],  # long computation on all ranks
        [make_inside(0, 9), make_outside(1)],  # evaluation on one rank
        [make_inside(0, 20), make_inside(1, 1)],  # it has come
        [
            make_inside(0, 20),
            make_outside(1, number=5),
        ],  # it has arrived and left, and the view of rank 0 is a little old
        [make_inside(0, 20), make_outside(1, excused_age=2)],  # held by a debugger two seconds ago
        [make_inside(0, 20), make_outside(1), make_outside(2, exit_code=1)],  # failed, which is reported differently
        [make_inside(0, 20), make_inside(1, 20, excused_age=3)],
        [],
    ],
)
def test_healthy_ranks_cause_no_alarm(views):
    assert diagnose_hang(views, 10) is None


def test_timeout_of_zero_means_no_limit():
    assert diagnose_hang([make_inside(0, 1e9), make_outside(1)], 0) is None
    assert diagnose_hang([make_inside(0, 1e9, lenience=5), make_outside(1)], 0) is None


def test_lenience_of_one_rank_holds_for_all():
    for views in ([make_inside(0, 17, lenience=8), make_inside(1, 17)], [make_inside(0, 17, lenience=8), make_outside(1)],
                  [make_inside(0, 17), make_outside(1, lenience=8)]):  # fmt: skip
        assert diagnose_hang(views, 10) is None
    verdict = diagnose_hang([make_inside(0, 19, lenience=8), make_outside(1), make_inside(2, 3)], 10)
    assert verdict is not None
    assert [view.rank for view in verdict.missing] == [1]
    assert "(timeout 18 s)" in report.format_headline(verdict)
    assert "8 s of this timeout were added because a rank waits for data" in report.format_report(verdict)
    assert list_missing([make_inside(0, 17), make_outside(1, phase="ended", lenience=8)]) == [
        1
    ]  # a rank that has ended requests nothing


@pytest.mark.parametrize(
    ("view", "told"),
    [
        (make_outside(1, state="T", beat_age=8.0, pid=77), "is stopped (process state T"),
        (make_outside(1, beat_age=8.0), "holds the interpreter lock in C code (no heartbeat for 8 s)"),
        (make_outside(1, phase="ended"), "has finished its script"),
        (make_outside(1, exit_code=0), "has finished its script"),
        (make_outside(1, beat_age=None, calls=()), "is not a Python program that Headway started"),
        (make_outside(1, state="D"), "process state D"),
        (make_outside(1, calls=None), "is at"),
        (make_inside(1, 20, state="T"), "is stopped"),  # stopped inside the operation
        (make_outside(1, frames=(Frame(f"{SITE}/torch/utils/data/dataloader.py", 9, "_get"), Frame("/u/t.py", 3, "main"))),
         "waits for data at /u/t.py:3 in main"),
    ],
)  # fmt: skip
def test_report_describes_the_missing_rank(view, told):
    verdict = diagnose_hang([make_inside(0, 11), view], 10)
    assert verdict is not None
    assert report.format_headline(verdict) == (
        "this run hangs: rank 1 of 2 is missing from all_reduce, where rank 0 has waited for 11 s (timeout 10 s)"
    )
    assert told in report.format_report(verdict)
    json.dumps(report.encode_diagnosis(verdict))


def test_different_order_of_operations_is_reported():
    verdict = diagnose_hang([make_inside(0, 11), make_inside(1, 12, operation="broadcast")], 10)
    assert verdict is not None
    assert verdict.missing == ()
    assert "all 2 ranks have waited for 12 s (timeout 10 s), but not in the same operation" in report.format_report(
        verdict
    )
    assert "rank 0 waits in all_reduce #5" in report.format_report(verdict)
    assert "rank 1 waits in broadcast #5" in report.format_report(verdict)


def test_rank_that_cannot_leave_an_earlier_operation_is_reported():
    verdict = diagnose_hang([make_inside(0, 11, number=6), make_inside(1, 12)], 10)
    assert verdict is not None
    assert (
        "not in the same operation: rank 1 cannot leave an earlier one, or their order differs"
        in report.format_report(verdict)
    )


def test_all_ranks_wait_in_one_operation():
    verdict = diagnose_hang([make_inside(0, 11), make_inside(1, 12)], 10)
    assert verdict is not None
    assert "in the same operation: the likely cause is the network between them" in report.format_headline(verdict)


def test_only_members_of_the_group_are_missing():
    views = [
        make_inside(0, 11, group="tp", members=(0, 1)),
        make_outside(1, group="tp"),
        make_outside(2),
        make_outside(3),
    ]
    assert list_missing(views) == [1]


def test_ledger_has_priority_over_the_flight_recorder():
    view = make_inside(0, 11, group="headway", operation="objects")
    view = dataclasses.replace(view, calls=(*view.calls, CollectiveCall("0", 9, "all_gather", 11.0)))
    assert view.operation == "gather_object"
    assert view.number_in("0") == 9


def test_rendezvous_counts_as_waiting():
    frame = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 9, "init_process_group")
    waits = RankView(0, beat_age=0.1, frames=(frame, Frame("/u/t.py", 3, "main")), still_age=11)
    verdict = diagnose_hang([waits, RankView(1, beat_age=0.1, frames=(Frame("/u/t.py", 1, "main"),))], 10)
    assert verdict is not None
    assert "missing from init_process_group" in report.format_headline(verdict)


def test_debugger_and_file_writes_excuse_a_rank():
    bug = RankView(1, frames=(Frame(f"{STDLIB}/pdb.py", 3, "cmdloop"),))
    assert hang.find_excuse(bug, 10) == "a debugger has stopped it"
    assert hang.find_excuse(RankView(1, state="t"), 10) == "a debugger has stopped it"
    saves = RankView(1, frames=(Frame(f"{SITE}/torch/serialization.py", 3, "save"),), writing_age=1)
    assert hang.find_excuse(saves, 10) == "it writes a file"
    assert hang.find_excuse(dataclasses.replace(saves, writing_age=11), 10) == ""
    assert hang.find_excuse(RankView(1, writing_age=0), 10) == ""


def test_ranks_are_listed_as_ranges():
    views = [make_inside(rank, 11) for rank in range(6)] + [make_outside(6), make_outside(7)]
    text = report.format_headline(diagnose_hang(views, 10))
    assert "ranks 6-7 of 8 are missing from all_reduce, where ranks 0-5 have waited" in text


CALLS = st.builds(
    CollectiveCall, st.sampled_from(["headway", "0", "1"]), st.integers(1, 9), st.sampled_from(["gather", "barrier"]),
    st.none() | st.floats(0, 100), st.none() | st.just((0, 1)),
)  # fmt: skip
AGES = st.floats(0, 100) | st.just(math.inf)
VIEWS = st.builds(
    RankView, st.just(0), host=st.just("h"), exit_code=st.sampled_from([None, None, None, 0, 1]),
    state=st.sampled_from(["", "R", "S", "T", "t", "D"]), beat_age=st.none() | st.floats(0, 100),
    phase=st.sampled_from(["", "", "ended"]),
    frames=st.lists(st.builds(Frame, st.sampled_from(["/u/t.py", f"{SITE}/torch/distributed/rendezvous.py"]),
                              st.integers(1, 99), st.just("f")), max_size=20).map(tuple),
    calls=st.none() | st.lists(CALLS, max_size=3).map(tuple), writing_age=AGES, excused_age=AGES,
)  # fmt: skip
TABLES = st.lists(VIEWS, max_size=6).map(
    lambda views: [dataclasses.replace(view, rank=rank) for rank, view in enumerate(views)]
)


@pytest.mark.slow
@given(TABLES, st.floats(0, 50))
@settings(max_examples=500, deadline=None)
def test_every_verdict_is_sound(views, timeout):
    verdict = diagnose_hang(views, timeout)
    if verdict is None:
        return
    assert not any(view.exit_code for view in views)
    assert timeout > 0
    waiting, absent = {view.rank for view in verdict.waiting}, {view.rank for view in verdict.missing}
    assert waiting
    assert not waiting & absent
    assert verdict.waiting[0].wait is not None
    assert max(view.wait.age for view in verdict.waiting) > timeout
    assert all(view.excused_age > timeout for view in verdict.missing)
    # A rank that waits like the others is never missing, unless it is stopped, silent or has ended.
    assert all(view.wait is None or view.is_mute or view.has_ended for view in verdict.missing)
    assert report.format_report(verdict).startswith("this run hangs: ")
    json.dumps(report.encode_diagnosis(verdict))


@pytest.mark.slow
@given(TABLES, st.floats(1, 50))
@settings(max_examples=200, deadline=None)
def test_longer_timeout_never_finds_more(views, timeout):
    if diagnose_hang(views, timeout) is None:
        assert diagnose_hang(views, 2 * timeout) is None


@pytest.mark.slow
@given(TABLES)
@settings(max_examples=200, deadline=None)
def test_view_is_encoded_and_decoded(views):
    for view in views:
        back = decode_view(json.loads(json.dumps(encode_view(view))))
        assert dataclasses.replace(back, frames=()) == dataclasses.replace(view, frames=())
        assert back.wait is None or view.wait is not None
        assert back.frames[:1] == view.frames[:1]


def test_waiting_for_the_commit_of_a_checkpoint_is_a_wait_without_a_collective():
    commits = RankView(
        0, beat_age=0.1, phase=heartbeat_file.WAITING_FOR_PARTS, phase_age=11, frames=WRITER, writing_age=11
    )
    writes = RankView(1, beat_age=0.1, frames=WRITER, writing_age=11, still_age=11, excused_age=11)
    verdict = diagnose_hang([commits, writes], 10)
    assert verdict is not None
    assert [view.rank for view in verdict.missing] == [1]
    assert "rank 1 of 2 is missing from the commit of a checkpoint" in report.format_headline(verdict)
    assert (
        "it writes a checkpoint, and no byte has moved for 11 s: its file system does not answer"
        in report.format_report(verdict)
    )
    assert "save_state was called" not in report.format_report(verdict)
    assert hang.find_excuse(dataclasses.replace(commits, writing_age=1), 10) == ""


def test_hook_of_the_user_is_no_slow_disk():
    hooked = RankView(1, beat_age=0.1, frames=(Frame("/u/t.py", 3, "hook"), *WRITER), writing_age=11, still_age=11)
    assert hang.is_writing(hooked)  # written bytes would excuse it
    assert not hang.is_stuck_writing(hooked, 10)
    assert hang.is_stuck_writing(dataclasses.replace(hooked, frames=WRITER), 10)
    assert not hang.is_stuck_writing(RankView(1, frames=WRITER, still_age=11), 10)  # its bytes were not measured


def test_lingering_rank_is_reported():
    over = RankView(0, exit_code=0, phase="ended", phase_age=11, idle_age=11)
    stuck = RankView(1, phase="ended", phase_age=11, idle_age=11, frames=(Frame("/u/t.py", 3, "tidy"),))
    verdict = hang.diagnose_lingering([over, stuck], 10, 2)
    assert verdict is not None
    assert [view.rank for view in verdict.missing] == [1]
    text = report.format_report(verdict)
    assert "this run does not end: rank 1 of 2 has come to the end of the script, but not ended for 11 s" in text
    assert "is at /u/t.py:3 in tidy" in text
    json.dumps(report.encode_diagnosis(verdict))
    for calm in (
        [over, dataclasses.replace(stuck, idle_age=2)],  # an upload is running
        [over, dataclasses.replace(stuck, phase_age=2)],
        [RankView(0, phase=""), stuck],  # others are still training
        [dataclasses.replace(over, exit_code=1), stuck],  # failed, which is reported differently
        [over],
    ):
        assert hang.diagnose_lingering(calm, 10, 2) is None
    assert hang.diagnose_lingering([over, stuck], 0, 2) is None
