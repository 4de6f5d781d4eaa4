"""Test the watch for hangs with the heartbeat files of two ranks."""

import json
import os
import sysconfig
import time

import pytest

from headway.core.checkpoint.saving import writer
from headway.core.runtime import heartbeat_file
from headway.launch.agent.endings import HangReport
from headway.launch.watch.hang_watch import HangWatch, ObservedRank, describe_progress
from headway.launch.watch.views import encode_view

STDLIB = sysconfig.get_path("stdlib")


class RankFiles:
    """Heartbeat files of two ranks, written by the test instead of the ranks."""

    def __init__(self, folder, said, machines=None, timeout=0.3):
        paths = [folder / f"rank{rank}.pulse" for rank in range(2)]
        for path in paths:
            heartbeat_file.create_file(path)
        self.files = [heartbeat_file.HeartbeatFile(path) for path in paths]
        self.workers = [ObservedRank(rank, os.getpid(), path) for rank, path in enumerate(paths)]
        self.watch = HangWatch(timeout, said.append, machines)
        self.watch._workers, self.watch._world_size = tuple(self.workers), 2
        self.beat(0, "/u/train.py", 7)
        self.beat(1, "/u/train.py", 9)

    def beat(self, rank, file, line):
        self.files[rank].set_note({"stack": [[file, line, "main"]], "still": time.monotonic(), "torch": []})
        self.files[rank].record_beat(1)

    def check_ranks(self):
        for one in self.files:
            one.record_beat(2)  # a busy machine must not delay them
        self.watch._check_ranks(self.watch._workers)
        return None if self.watch.found is None else HangReport(self.watch.found)


@pytest.fixture
def said():
    """List for printed messages."""
    return []


def test_missing_rank_is_found_in_the_heartbeat_files(tmp_path, said):
    ranks = RankFiles(tmp_path, said)
    ranks.files[1].note_progress(12, 1)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    assert ranks.check_ranks() is None
    time.sleep(0.35)
    report = ranks.check_ranks()
    assert report is not None
    assert "rank 1 of 2 is missing from gather, where rank 0 has waited" in report.format_headline()
    assert "rank 1 (host" in report.format_text()
    assert "update 12, micro-step 1) is at /u/train.py:9 in main" in report.format_text()
    report.write(tmp_path / "logs/failure.json")
    kept = json.loads((tmp_path / "logs/failure.json").read_text())
    assert kept["hang"]["missing"][0]["where"] == "/u/train.py:9 in main"
    assert kept["exit_code"] == report.exit_code == 1
    assert describe_progress(ranks.workers[1].path) == "update 12, micro-step 1"
    assert describe_progress(ranks.workers[0].path) == ""


def test_requested_stack_dump_does_not_count_as_writing(tmp_path):
    path = tmp_path / "rank0.pulse"
    heartbeat_file.create_file(path)
    worker = ObservedRank(0, os.getpid(), path)
    with open(f"{path}.stacks", "w") as dump, open(tmp_path / "model", "w") as file:
        worker.update_activity(1.0)
        dump.write("a stack" * 9)
        dump.flush()
        worker.update_activity(2.0)
        assert worker.last_write == 1.0
        file.write("weights")
        file.flush()
        worker.update_activity(3.0)
        assert worker.last_write == 3.0


def test_write_excuses_up_to_its_last_byte(tmp_path, said):
    ranks = RankFiles(tmp_path, said, timeout=1.0)
    ranks.beat(1, writer.__file__, 3)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    ranks.watch._read_view(ranks.workers[1])
    began = time.monotonic()
    view = ranks.watch._read_view(ranks.workers[1])
    while view.excused_age <= 1.0 and time.monotonic() - began < 10:
        time.sleep(0.05)
        view = ranks.watch._read_view(ranks.workers[1])
    assert view.excused_age == pytest.approx(view.writing_age)


def test_rank_that_arrives_is_not_missing(tmp_path, said):
    ranks = RankFiles(tmp_path, said)
    number = ranks.files[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    ranks.files[0].leave_collective(number)
    assert ranks.check_ranks() is None


@pytest.mark.slow
def test_debugger_is_reported_once_and_extends_the_time(tmp_path, said):
    ranks = RankFiles(tmp_path, said, timeout=1.5)
    ranks.beat(1, f"{STDLIB}/pdb.py", 3)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(1.6)
    assert ranks.check_ranks() is None
    assert ranks.check_ranks() is None
    assert len(said) == 1
    assert "a debugger has stopped it" in said[0]
    ranks.beat(1, "/u/train.py", 9)
    assert ranks.check_ranks() is None  # it has just continued
    time.sleep(1.6)
    assert ranks.check_ranks() is not None


def test_script_sets_the_timeout(tmp_path, said):
    ranks = RankFiles(tmp_path, said)
    ranks.files[0].set_timeout(60.0)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.check_ranks() is None


def test_machine_0_decides_for_all(tmp_path, said):
    told = []

    class FakeMachines:
        others = None

        def send_views(self, views):
            told.append(json.loads(json.dumps(views)))

        def get_views(self):
            return self.others

    machines = FakeMachines()
    ranks = RankFiles(tmp_path, said, machines)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.check_ranks() is None  # another machine must decide
    assert [view["rank"] for view in told[0]] == [0, 1]
    machines.others = []
    ranks.watch._workers = (ranks.workers[0],)
    assert ranks.check_ranks() is None  # that machine has not sent anything yet
    machines.others = [told[0][1]]
    report = ranks.check_ranks()
    assert report is not None
    assert "rank 1 of 2 is missing" in report.format_headline()


def test_restart_begins_a_new_watch(tmp_path, said):
    ranks = RankFiles(tmp_path, said)
    ranks.files[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.check_ranks() is not None
    ranks.watch.release_ranks()
    assert ranks.watch._workers == ()
    ranks.watch.note_ended({})
    watch = HangWatch(0, said.append)
    watch.watch_ranks(ranks.workers, 2)
    assert watch._thread is None  # a timeout of 0 disables the watch
    watch.note_ended({1: 0})
    assert ranks.workers[1].exit_code == 0
    assert encode_view(ranks.watch._read_view(ranks.workers[1]))["exit_code"] == 0
