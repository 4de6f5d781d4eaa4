"""Test the first failure: which of several exits is the cause, its report, and failure.json."""

import json
import signal
import sys
import threading
from dataclasses import replace

import pytest
import torch

from headway.common.callsite import find_user_line
from headway.launch.agent.endings import FailureReport, MachineLost, read_file_identity
from headway.launch.agent.records import ExceptionRecord, RankExit, read_record, write_record
from headway.launch.memory_watch import MemoryWatch


def make_record(kind="ValueError", text="bad luck", line="train.py:3", at=10.0):
    return ExceptionRecord(kind, text, line, f"Traceback of {kind}\n{kind}: {text}\n", at)


def make_exit(rank, code=1, rec=None, **more):
    return RankExit(rank, "box", 100 + rank, code, rec, **more)


LOST = make_record("RuntimeError", "[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1234", "train.py:9", at=9.0)


def test_earliest_exception_is_first():
    report = FailureReport(
        (
            make_exit(0, rec=make_record(at=10.2)),
            make_exit(1, rec=make_record("KeyError", "'x'", "train.py:5", at=10.1)),
        ),
        2,
    )
    assert report.first.rank == 1
    text = report.format_text()
    assert text.startswith(
        "headway: rank 1 of 2 failed first, at train.py:5 (host box, pid 101)\nTraceback of KeyError"
    )
    assert text.count("Traceback") == 1
    assert "then rank 0: ValueError: bad luck (train.py:3)" in text
    assert report.exit_code == 1


def test_lost_connection_is_a_consequence_even_if_noticed_first():
    assert FailureReport((make_exit(0, rec=LOST), make_exit(1, rec=make_record(at=11.0))), 2).first.rank == 1
    assert FailureReport((make_exit(0, rec=LOST), make_exit(1, code=3)), 2).first.rank == 1
    assert FailureReport((make_exit(0, rec=LOST), make_exit(1, code=-9)), 2).first.rank == 1
    assert FailureReport((make_exit(0, rec=LOST),), 2).first.rank == 0


def test_lost_connection_is_reported_in_one_line():
    text = FailureReport((make_exit(0, rec=make_record(at=11.0)), make_exit(1, rec=LOST)), 2).format_text()
    assert text.splitlines()[-1] == "headway: rank 1 then lost its connection to rank 0 (train.py:9)"
    assert "gloo" not in text


def test_lost_connections_of_several_ranks_are_one_line():
    late = replace(LOST, line="train.py:12")
    deaths = (
        make_exit(0, rec=LOST),
        make_exit(1, code=-9),
        make_exit(2, rec=LOST),
        make_exit(3, rec=late),
        make_exit(4, code=5),
    )
    text = FailureReport(deaths, 6).format_text()
    assert text.splitlines()[2:] == [
        "headway: ranks 0, 2 then lost their connection to the others (train.py:9)",
        "headway: rank 3 then lost its connection to the others (train.py:12)",
        "headway: then rank 4: ended with exit code 5",
        "headway: the other 1 process has been ended",
    ]


def test_whole_text_is_kept_in_the_file(tmp_path):
    noisy = replace(LOST, text=f"{LOST.text}. This is typically caused by a remote worker crashing. GLHF! 🏖️")
    report = FailureReport((make_exit(0, rec=noisy),), 2)
    report.write(tmp_path / "failure.json")
    kept = json.loads((tmp_path / "failure.json").read_text())["first"]["record"]
    assert kept["text"] == noisy.text


def test_screen_shows_the_short_trace_and_the_record_keeps_both(tmp_path, monkeypatch):
    from headway.core.config.files import read_config

    def fail_to_read():
        read_config(tmp_path / "none.yaml")

    for level, is_short in (("info", True), ("debug", False)):
        monkeypatch.setenv("HEADWAY_LOG_LEVEL", level)
        with pytest.raises(ValueError, match="cannot be read") as raised:
            fail_to_read()
        assert write_record(tmp_path / "error.json", raised.value, "a note")
        found = read_record(tmp_path / "error.json")
        assert "headway/core/config/files.py" in found.trace
        shown = FailureReport((make_exit(0, rec=found),), 2).format_text()
        assert ("headway/core/config/files.py" not in shown) is is_short
        assert shown.endswith(("a note", "a note\nheadway: the other 1 process has been ended"))


def test_identical_failures_are_counted():
    report = FailureReport(tuple(make_exit(rank, rec=make_record(at=10 + rank)) for rank in (0, 1, 2, 5)), 8)
    text = report.format_text()
    assert "the same on ranks 1-2, 5" in text
    assert "the other 4 processes have been ended" in text
    assert text.count("bad luck") == 1


def test_kill_is_explained_by_the_counters():
    report = FailureReport((make_exit(1, code=-9),), 2, memory="the kernel's out-of-memory killer sent it")
    assert "rank 1 was ended by SIGKILL: the kernel's out-of-memory killer sent it" in report.format_text()
    assert report.exit_code == 137
    assert (
        "the kernel's counters show no out-of-memory kill" in FailureReport((make_exit(1, code=-9),), 2).format_text()
    )


def test_crash_shows_its_python_stack():
    report = FailureReport(
        (make_exit(0, rec=LOST), make_exit(1, code=-signal.SIGSEGV, crash="File train.py, line 7 in main")), 2
    )
    assert report.first.rank == 1
    assert "ended by SIGSEGV\nFile train.py, line 7 in main" in report.format_text()
    assert report.exit_code == 139


def test_abort_by_a_library_shows_only_lines_of_the_user():
    library = [f'  File "{module.__file__}", line 7 in wait' for module in (threading, torch)]
    own = '  File "train.py", line 9 in <module>'
    dump = "\n".join(["Fatal Python error: Aborted", "", "Thread 0x1:", library[0], "", "Thread 0x2:", *library, own])
    text = FailureReport((make_exit(0, code=-signal.SIGABRT, crash=dump),), 2).format_text()
    assert "was ended by SIGABRT: a library gave up" in text
    assert text.endswith(f"\nThread 0x2:\n{own}\nheadway: the other 1 process has been ended")


def test_rank_ended_by_the_launcher_is_not_reported():
    report = FailureReport((make_exit(0, code=None, rec=LOST), make_exit(1, rec=make_record())), 2)
    assert report.first.rank == 1
    assert (
        FailureReport((make_exit(1, rec=make_record()), make_exit(0, code=None)), 2).format_text().count("rank 0") == 0
    )


def test_signal_from_outside_is_named():
    assert (
        "rank 0 was ended by SIGTERM, which was sent from outside of this run"
        in FailureReport((make_exit(0, code=-15),), 2).format_text()
    )


def test_exit_code_is_that_of_the_first_failure():
    assert FailureReport((make_exit(0, code=7),), 2).exit_code == 7


def _failing():
    try:
        json.loads("{")
    except ValueError as error:
        return error


def test_record_is_written_and_read(tmp_path):
    error = _failing()
    path = tmp_path / "error.json"
    assert write_record(path, error)
    found = read_record(path)
    assert found.kind == "JSONDecodeError"
    assert found.text == str(error)
    assert found.trace.startswith("Traceback")
    # The innermost line is in the standard library, and the reported one is the user's call.
    assert found.line.endswith("in _failing")
    assert "test_endings.py:" in found.line
    # torch's agent reads the same file
    assert json.loads(path.read_text())["message"]["extraInfo"]["timestamp"].isdigit()


def test_record_that_cannot_be_written_is_reported(tmp_path):
    assert not write_record(tmp_path / "no" / "folder", ValueError())


def test_record_of_torchs_decorator_is_read(tmp_path):
    path = tmp_path / "error.json"
    inner = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "12"}}
    path.write_text(json.dumps({"message": inner}))
    assert read_record(path) == ExceptionRecord("KeyError", "'x'", "", "Traceback ...", 12.0)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"message": "x"}'])
def test_damaged_record_is_none(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_text(content)
    assert read_record(path) is None


def test_error_without_a_line_of_the_user_has_an_empty_line():
    assert find_user_line(None) == ""


def test_failure_json_is_written(tmp_path):
    report = FailureReport((make_exit(0, rec=LOST), make_exit(1, rec=make_record())), 2, "memory")
    report.write(tmp_path / "logs" / "failure.json")
    content = json.loads((tmp_path / "logs" / "failure.json").read_text())
    assert content["first"]["rank"] == 1
    assert content["first"]["record"]["line"] == "train.py:3"
    assert (content["world_size"], content["exit_code"], len(content["ranks"])) == (2, 1, 2)


def test_lost_machine_replaces_only_the_report_of_an_earlier_attempt(tmp_path):
    path = tmp_path / "failure.json"
    MachineLost("machine 1 is lost", 0).write(path)
    former = read_file_identity(path)  # the next attempt begins
    MachineLost("machine 2 is lost", 0, former_file=former).write(path)
    assert json.loads(path.read_text())["lost_machine"] == "machine 2 is lost"
    FailureReport((make_exit(0, rec=make_record()),), 2).write(path)  # by the lost machine, into a shared folder
    MachineLost("machine 2 is lost", 0, former_file=former).write(path)
    assert "lost_machine" not in json.loads(path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's cgroups")
class TestMemoryWatch:
    def _v2(self, root, kills, path=""):
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text("0::/jobs/7\n")
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 5\noom {kills}\noom_kill {kills}\n")
        (folder / "memory.peak").write_text(f"{61 * 2**30}\n")
        (folder / "memory.max").write_text(f"{64 * 2**30}\n")

    @pytest.mark.parametrize("path", ["", "jobs/7"])
    def test_kills_are_read_from_counters_of_cgroup_version_2(self, tmp_path, path):
        self._v2(tmp_path, 1, path)
        watch = MemoryWatch(tmp_path)
        assert watch.describe_kills() == ""
        self._v2(tmp_path, 2, path)
        assert "out-of-memory killer" in watch.describe_kills()
        assert "61.0 GiB of 64.0 GiB" in watch.describe_kills()

    def test_kills_are_read_from_counters_of_cgroup_version_1(self, tmp_path):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/1\n0::/\n")
        folder = tmp_path / "sys/fs/cgroup/memory/docker/1"
        folder.mkdir(parents=True)
        (folder / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 0\n")
        watch = MemoryWatch(tmp_path)
        (folder / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 1\n")
        (folder / "memory.max_usage_in_bytes").write_text("1024\n")
        (folder / "memory.limit_in_bytes").write_text("2048\n")
        assert "1.0 KiB of 2.0 KiB" in watch.describe_kills()

    def test_counter_of_the_host_is_used_without_a_cgroup(self, tmp_path):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/vmstat").write_text("pgfault 1\noom_kill 3\n")
        watch = MemoryWatch(tmp_path)
        assert watch.describe_kills() == ""
        (tmp_path / "proc/vmstat").write_text("pgfault 1\noom_kill 4\n")
        assert "out-of-memory" in watch.describe_kills()

    def test_nothing_to_read(self, tmp_path):
        assert MemoryWatch(tmp_path).describe_kills() == ""
