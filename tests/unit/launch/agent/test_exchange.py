"""Test the exchange of failures between agents: all print one report, and a shared screen shows one traceback."""

import threading

import pytest
from torch.distributed import HashStore

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.launch.agent.endings import FailureReport
from headway.launch.agent.exchange import AgentChannel
from headway.launch.agent.records import ExceptionRecord, RankExit


def make_report(rank: int) -> FailureReport:
    record = ExceptionRecord("ValueError", "bad luck", "train.py:3", "Traceback\nValueError: bad luck\n", 10.0)
    return FailureReport((RankExit(rank, f"host-{rank}", 100 + rank, 1, record),), 3)


def merge_reports(unit: str, machines: tuple[int, ...], *, is_over: bool = False) -> dict[int, str]:
    """Return the reports of the given machines, of three in the run, after rank 1 has failed."""
    seal, found = Seal(b"", UnsealedCounter(print)), {}
    meeting = SealedStore(HashStore(), "meeting", seal)
    exchanges = [AgentChannel(machine, 3, "127.0.0.1", seal, unit) for machine in range(3)]
    for exchange in exchanges:
        exchange.connect(meeting, 3)

    def merge_on(machine: int) -> None:
        report = exchanges[machine].merge(make_report(1) if machine == 1 else None, lambda: is_over)
        assert report is not None
        assert report.exit_code == 1
        assert [death.rank for death in report.deaths] == [1]
        found[machine] = report.format_text()

    threads = [threading.Thread(target=merge_on, args=(machine,)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for exchange in reversed(exchanges):
        exchange.stop_listening()
    return found


BRIEF = "headway: rank 1 on host host-1 failed first, at train.py:3; its report is with rank 0's output"


@pytest.mark.slow
def test_tasks_on_a_shared_screen_show_one_traceback():
    told = merge_reports("task", (0, 1, 2))
    assert told[0].startswith("headway: rank 1 of 3 failed first, at train.py:3 (host host-1, pid 101)\nTraceback")
    assert told[1] == told[2] == BRIEF


def test_each_machine_shows_the_traceback():
    told = merge_reports("machine", (0, 1, 2))
    assert told[0] == told[1] == told[2]
    assert told[0].count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_over", [True, False])
def test_without_task_0_each_task_shows_the_traceback(monkeypatch, is_over):
    monkeypatch.setattr("headway.launch.agent.exchange.REPORTS_TIMEOUT", 1.5)
    told = merge_reports("task", (1,) if is_over else (1, 2), is_over=is_over)
    assert all(text.count("Traceback") == 1 for text in told.values())
    assert 1 in told
