"""Test reading torch's flight recorders: gloo's real one, and NCCL's as a JSON dump built from torch's source."""

import threading
import time

import pytest
import torch
import torch._C._distributed_c10d as engine
import torch.distributed as dist

from headway.core.runtime import heartbeat_file
from headway.core.runtime.flight_recorder import FlightRecorder, find_current_collectives, reset_recorders
from headway.core.runtime.heartbeat import Heartbeat
from headway.launch.watch.judge import diagnose_hang
from headway.launch.watch.report import format_report
from headway.launch.watch.views import make_view
from tests.unit.core.runtime.nccl_dump import make_content, make_dump, make_entry


@pytest.fixture
def process_group():
    """Create a gloo group of one process, and destroy it after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def find_latest_calls(entries, engine_name="nccl", members=None):
    """Return (calls, now): the call that `find_current_collectives` finds for each group, by group name, and the monotonic time."""
    now = time.monotonic()
    calls = find_current_collectives(engine_name, entries, make_content(entries)["pg_status"], members or {}, now)
    return {call["group"]: call for call in calls}, now


def make_gloo_entry(group, number, operation, *, is_p2p=False, retired=False, age=5.0):
    return {"process_group": [group, "x"], "pg_id": int(group), "collective_seq_id": number, "is_p2p": is_p2p,
            "profiling_name": f"gloo:{operation}", "time_created_ns": (time.time() - age) * 1e9, "retired": retired}  # fmt: skip


def test_current_collective_of_each_gloo_group_is_found():
    entries = [
        make_gloo_entry("0", 1, "broadcast", retired=True),
        make_gloo_entry("1", 4, "barrier"),
        make_gloo_entry("0", 2, "all_reduce"),
        make_gloo_entry("0", 2, "send", is_p2p=True),
    ]
    status = {
        "0": {"last_enqueued_collective": "2", "last_completed_collective": "1"},
        "1": {"last_enqueued_collective": "4", "last_completed_collective": "4"},
    }
    now = time.monotonic()
    first, second = sorted(
        find_current_collectives("fr", entries, status, {"0": [0, 1]}, now), key=lambda call: call["group"]
    )
    assert (first["number"], first["operation"], first["members"]) == (2, "all_reduce", [0, 1])
    assert 4 < now - first["since"] < 10
    assert (second["number"], second["since"], second["members"]) == (4, None, None)
    assert find_current_collectives("fr", [], {}, {}, now) == []


def test_counters_in_the_wrong_order_report_no_open_collective():
    """With gloo, a thread was observed to record its collective's number after the number of a later collective."""
    now = time.monotonic()
    status = {"0": {"last_enqueued_collective": "3", "last_completed_collective": "2"}}
    assert (
        find_current_collectives("fr", [make_gloo_entry("0", 3, "all_reduce", retired=True)], status, {}, now)[0][
            "since"
        ]
        is None
    )
    assert (
        find_current_collectives("fr", [make_gloo_entry("0", 3, "all_reduce")], status, {}, now)[0]["since"] is not None
    )


def test_earliest_incomplete_collective_of_nccl_is_found():
    entries = [
        make_entry(4, "broadcast", "completed", age=30),
        make_entry(5, "all_reduce", age=20),
        *(make_entry(number, "_all_gather_base", age=19) for number in range(6, 90)),
    ]
    found, now = find_latest_calls(entries, members={"0": [0, 1]})
    call = found["nccl:0"]
    assert (call["number"], call["operation"], call["members"]) == (5, "all_reduce", [0, 1])
    assert 19 < now - call["since"] < 25


def test_counters_shared_with_sends_hide_no_open_collective():
    """Sends and collectives share NCCL's counter of completed operations, so equal counters do not mean idleness."""
    entries = [make_entry(1, "all_reduce", age=5), make_entry(1, "send 0->1", "completed", is_p2p=True)]
    found, _ = find_latest_calls(entries)
    assert found["nccl:0"]["since"] is not None


def test_collective_completed_on_the_device_is_not_open():
    entries = [
        {**make_entry(3, "all_reduce", "completed"), "retired": False},
        {**make_entry(4, "all_reduce"), "retired": True},
    ]
    found, _ = find_latest_calls(entries)
    assert (found["nccl:0"]["number"], found["nccl:0"]["since"]) == (4, None)


def test_collective_not_yet_given_to_the_device_is_not_complete():
    """Simulate a call that is stuck in NCCL. Its entry says completed, because NCCL treats unrecorded events as reached."""
    entries, status = [make_entry(3, "broadcast", "completed"), make_entry(4, "all_reduce", "completed")], {"0": {}}
    status["0"]["last_enqueued_collective"] = "3"
    (found,) = find_current_collectives(
        "nccl", [{**each, "retired": False} for each in entries], status, {}, time.monotonic()
    )
    assert (found["number"], found["operation"], found["since"]) == (3, "broadcast", None)
    sends = [*entries, make_entry(1, "send 0->1", "completed", is_p2p=True)]  # sends share the counter
    (found,) = find_current_collectives("nccl", sends, {"0": {"last_enqueued_collective": "1"}}, {}, time.monotonic())
    assert found["number"] == 4


def test_aborted_group_with_the_same_name_is_ignored():
    entries = [make_entry(7, "all_reduce", age=50), make_entry(1, "broadcast", "completed", pg_id=1)]
    found, _ = find_latest_calls(entries)
    assert (found["nccl:0"]["number"], found["nccl:0"]["since"]) == (1, None)


def test_both_recorders_are_read(process_group, monkeypatch):
    monkeypatch.setattr(
        engine,
        "_dump_nccl_trace_json",
        lambda whole=True: make_dump([make_entry(2, "all_reduce", age=9)], whole),
        raising=False,
    )
    dist.all_reduce(torch.ones(1))
    recorder, groups, deadline = FlightRecorder(), {}, time.monotonic() + 30
    # gloo's thread records the completion a little later.
    while not ("0" in groups and groups["0"]["since"] is None) and time.monotonic() < deadline:
        recorder.check_counters()
        groups = {call["group"]: call for call in recorder._calls or []}
    assert groups["nccl:0"]["since"] is not None
    assert groups["0"]["since"] is None
    assert groups["nccl:0"]["members"] == groups["0"]["members"] == [0]


def test_heartbeat_does_not_wait_for_events_that_block(process_group, monkeypatch):
    """If the driver is stuck, the heartbeat continues and reports what the counters alone show."""
    blocked, is_reading = threading.Event(), threading.Event()

    def dump_or_block(whole=True):
        if whole:
            is_reading.set()
            blocked.wait(60)
        return make_dump([make_entry(2, "all_reduce", age=9)], whole)

    monkeypatch.setattr(engine, "_dump_nccl_trace_json", dump_or_block, raising=False)
    own, recorder = heartbeat_file.HeartbeatFile(), FlightRecorder()
    beating = Heartbeat(own, recorder)
    try:
        deadline = time.monotonic() + 30
        while not is_reading.is_set() and time.monotonic() < deadline:
            beating.write_beat()
            time.sleep(0.05)
        assert is_reading.is_set()
        began = time.monotonic()
        beating.write_beat()
        assert time.monotonic() - began < 5
        assert [call["operation"] for call in own.read().note["torch"]] == ["a collective"]
    finally:
        blocked.set()
        recorder.stop()


def test_diagnosis_names_the_rank_missing_from_a_device_collective():
    """Rank 0 has enqueued ten more collectives and waits for the device. Rank 1 has not reached the first of them."""
    done = [make_entry(number, "all_reduce", "completed", age=40) for number in range(1, 5)]
    ahead = [*done, *(make_entry(number, "all_reduce", age=30) for number in range(5, 15))]
    now = time.monotonic()
    views = []
    for rank, entries in enumerate((ahead, done)):
        calls = find_current_collectives("nccl", entries, make_content(entries)["pg_status"], {"0": [0, 1]}, now)
        note = {"stack": [["/u/train.py", 7 + rank, "main"]], "still": now - 30, "torch": calls}
        views.append(
            make_view(
                rank, heartbeat_file.HeartbeatReading(pid=9, num_beats=5, last_beat=now, note=note, note_time=now), now
            )
        )
    verdict = diagnose_hang(views, 10.0)
    assert verdict is not None
    told = format_report(verdict)
    assert "rank 1 of 2 is missing from all_reduce, where rank 0 has waited for 30 s (timeout 10 s)" in told
    assert "waits in all_reduce #5 at /u/train.py:7 in main" in told
    assert "is at /u/train.py:8 in main" in told


def test_records_of_an_aborted_group_are_dropped(monkeypatch):
    said = []
    monkeypatch.setattr(engine, "_reset_fr_recording_nccl", lambda: said.append(1), raising=False)
    reset_recorders()
    assert said == [1]
