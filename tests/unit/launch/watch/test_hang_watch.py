import json
import os
import sysconfig
import time

import pytest

from headway.core.checkpoint.saving import writer
from headway.core.runtime import pulse
from headway.launch.agent.endings import HangReport
from headway.launch.watch.hang_watch import HangWatch, Worker, describe_progress
from headway.launch.watch.views import encode_view

STDLIB = sysconfig.get_path("stdlib")


class Ranks:
    """Pulses of two ranks, written by the test instead of the ranks."""

    def __init__(self, folder, said, machines=None, timeout=0.3):
        paths = [folder / f"rank{rank}.pulse" for rank in range(2)]
        for path in paths:
            pulse.create_pulse(path)
        self.pulses = [pulse.HeartbeatFile(path) for path in paths]
        self.workers = [Worker(rank, os.getpid(), path) for rank, path in enumerate(paths)]
        self.watch = HangWatch(timeout, said.append, machines)
        self.watch._workers, self.watch._world_size = tuple(self.workers), 2
        self.beat(0, "/u/train.py", 7)
        self.beat(1, "/u/train.py", 9)

    def beat(self, rank, file, line):
        self.pulses[rank].set_note({"stack": [[file, line, "main"]], "still": time.monotonic(), "torch": []})
        self.pulses[rank].record_beat(1)

    def look(self):
        for one in self.pulses:
            one.record_beat(2)  # a busy machine must not make them late
        self.watch._check_ranks(self.watch._workers)
        return None if self.watch.found is None else HangReport(self.watch.found)


@pytest.fixture
def said():
    return []


def test_a_missing_rank_is_found_in_the_pulses(tmp_path, said):
    ranks = Ranks(tmp_path, said)
    ranks.pulses[1].note_progress(12, 1)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    assert ranks.look() is None
    time.sleep(0.35)
    report = ranks.look()
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


def test_what_a_rank_dumps_when_it_is_asked_is_no_file_being_written(tmp_path):
    path = tmp_path / "rank0.pulse"
    pulse.create_pulse(path)
    worker = Worker(0, os.getpid(), path)
    with open(f"{path}.stacks", "w") as dump, open(tmp_path / "model", "w") as file:
        worker.update_activity(1.0)
        dump.write("a stack" * 9)
        dump.flush()
        worker.update_activity(2.0)
        assert worker.written == 1.0
        file.write("weights")
        file.flush()
        worker.update_activity(3.0)
        assert worker.written == 3.0


def test_a_write_excuses_up_to_its_last_byte(tmp_path, said):
    ranks = Ranks(tmp_path, said, timeout=1.0)
    ranks.beat(1, writer.__file__, 3)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    ranks.watch._read_view(ranks.workers[1])
    began = time.monotonic()
    view = ranks.watch._read_view(ranks.workers[1])
    while view.excused_age <= 1.0 and time.monotonic() - began < 10:
        time.sleep(0.05)
        view = ranks.watch._read_view(ranks.workers[1])
    assert view.excused_age == pytest.approx(view.writing_age)


def test_one_that_comes_is_not_missing(tmp_path, said):
    ranks = Ranks(tmp_path, said)
    number = ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    ranks.pulses[0].leave_collective(number)
    assert ranks.look() is None


@pytest.mark.slow
def test_a_debugger_is_reported_once_and_extends_the_time(tmp_path, said):
    ranks = Ranks(tmp_path, said, timeout=1.5)
    ranks.beat(1, f"{STDLIB}/pdb.py", 3)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(1.6)
    assert ranks.look() is None
    assert ranks.look() is None
    assert len(said) == 1
    assert "a debugger holds it" in said[0]
    ranks.beat(1, "/u/train.py", 9)
    assert ranks.look() is None  # it has just gone on
    time.sleep(1.6)
    assert ranks.look() is not None


def test_the_script_decides_the_timeout(tmp_path, said):
    ranks = Ranks(tmp_path, said)
    ranks.pulses[0].set_timeout(60.0)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.look() is None


def test_machine_0_judges_for_all(tmp_path, said):
    told = []

    class Machines:
        others = None

        def send_views(self, views):
            told.append(json.loads(json.dumps(views)))

        def get_views(self):
            return self.others

    machines = Machines()
    ranks = Ranks(tmp_path, said, machines)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.look() is None  # another machine's turn
    assert [view["rank"] for view in told[0]] == [0, 1]
    machines.others = []
    ranks.watch._workers = (ranks.workers[0],)
    assert ranks.look() is None  # that machine has not said anything yet
    machines.others = [told[0][1]]
    report = ranks.look()
    assert report is not None
    assert "rank 1 of 2 is missing" in report.format_headline()


def test_a_restart_begins_anew(tmp_path, said):
    ranks = Ranks(tmp_path, said)
    ranks.pulses[0].enter_collective("gather", "/u/train.py:7")
    time.sleep(0.35)
    assert ranks.look() is not None
    ranks.watch.end_attempt()
    assert ranks.watch._workers == ()
    ranks.watch.note_ended({})
    watch = HangWatch(0, said.append)
    watch.begin_attempt(ranks.workers, 2)
    assert watch._thread is None  # a timeout of 0 watches nobody
    watch.note_ended({1: 0})
    assert ranks.workers[1].exit_code == 0
    assert encode_view(ranks.watch._read_view(ranks.workers[1]))["exit_code"] == 0
