"""A machine dies and is replaced: checkpoints in the other machines' memory lose at most one update and restore bitwise."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import find_obstacle, network
from tests.distributed.ranks import free_port
from tests.sweep import memory

SLACK = 240
"""Timeout in seconds. It only detects hangs, so it is long enough for a busy machine."""

KILLED_AFTER = 9


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
@pytest.mark.parametrize("layout", memory.LAYOUTS)
def test_lost_machine_loses_at_most_one_update(layout, tmp_path):
    whole = memory.launch(tmp_path / "whole", layout, "0", 0, 0)
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "train.py").write_text(memory.PROGRAM)
    with network(2) as hosts:
        words = " ".join(["headway launch -n 2 --cpu --num_machines 2 --max_restarts 1", *memory.LAYOUTS[layout]])
        where = f"--machine_timeout 5 --main_process_ip {hosts[0].address} --main_process_port {free_port()}"
        commands = [f"exec {words} {where} --machine_rank {rank} train.py 0 0 1 none" for rank in range(2)]
        launchers = [host.start(command, folder) for host, command in zip(hosts, commands)]

        def said() -> str:
            return "\n".join(path.read_text() for path in sorted(folder.glob("host-*.txt")))

        deadline = time.monotonic() + SLACK
        while f'"update": {KILLED_AFTER},' not in (_read_if_present(folder / "rank1.jsonl")):
            assert time.monotonic() < deadline, said()
            time.sleep(0.005)
        hosts[1].send(signal.SIGKILL)
        launchers[1].wait(SLACK)
        shutil.copy(folder / "host-b.txt", folder / "before.txt")
        launchers[1] = hosts[1].start(commands[1], folder)
        assert [launcher.wait(SLACK) for launcher in launchers] == [0, 0], said()
        assert hosts[0].wait_for_processes() == []
    told = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank*.jsonl"))]
    outcome = memory.compare(told, whole)
    assert outcome.problems == []
    assert outcome.from_memory == [True], said()
    assert max(outcome.lost) <= 1


def _read_if_present(path: Path) -> str:
    return path.read_text() if path.exists() else ""
