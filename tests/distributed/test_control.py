"""The control plane with real processes: votes, shared keys, aborts, missing ranks, and the first failure."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from headway.errors import CollectiveError, ControlPlaneError
from tests.distributed.ranks import free_port, run_ranks
from tests.distributed.test_launch import launch, start_launch


def vote_often():
    from headway.core.runtime import process
    from headway.core.runtime.control_plane import control

    plane = control.current()
    rank, world_size = plane.rank, plane.world_size
    results = {}
    order = random.Random(rank)  # each rank is late at different times
    for step in range(30):
        time.sleep(order.random() / 200)
        assert plane.vote([0.0, float(rank == step % 3), -0.0], "any") == [0.0, 1.0, 0.0]
        assert plane.vote([rank + step, -rank, 0.5], "min") == [step, -(world_size - 1), 0.5]
        assert plane.vote([rank, 2**53 if rank == 1 else 0], "sum") == [3.0, 2.0**53]
        assert plane.vote([rank, float("-inf") if rank else 1.5]) == [world_size - 1, 1.5]
    assert plane.vote([]) == []
    assert plane.vote([0.0] * 40) == [0.0] * 40
    plane.set(f"from {rank}", bytes(range(256)) + bytes([rank]))
    results["given"] = [plane.get(f"from {other}", timedelta(seconds=60))[-1] for other in range(world_size)]
    assert plane.vote([1.0]) == [1.0]
    assert plane.has_key("from 0")
    assert not plane.has_key("from 9")

    server = process.get_control_link()._server
    before = server.num_keys() if server else None
    for _ in range(10_000):
        plane.vote((0.0, 0.0, 0.0, 0.0), "any")
    results["keys"] = None if server is None else server.num_keys() - before
    results["different"] = _error(lambda: plane.vote([1.0] * (1 + rank // 2)))
    results["after"] = _error(lambda: plane.vote([1.0]))

    process.reset()  # a second runtime of the same processes sees no keys of the first
    plane = control.current()
    assert not plane.has_key("from 0")
    assert plane.vote([rank], "sum") == [3.0]
    if rank != 1:
        results["missing"] = _error(lambda: plane.vote([1.0], timeout=timedelta(seconds=1)))
    else:
        time.sleep(4)
    process.reset()
    return results


def _error(call):
    try:
        return "nothing", call()
    except (CollectiveError, ControlPlaneError) as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_votes_agree_and_name_ranks_that_differ_or_are_missing():
    results = run_ranks(vote_often, 3, timeout=200)
    assert [each["given"] for each in results] == [[0, 1, 2]] * 3
    assert abs(results[0]["keys"]) <= 3  # keys of a vote in progress are temporary
    for each in results:
        assert each["different"][0] == "CollectiveError"
        assert "rank 2: max of 2 values" in each["different"][1]
        assert each["after"][0] == "ControlPlaneError"
    for rank in (0, 2):
        kind, text = results[rank]["missing"]
        assert kind == "ControlPlaneError"
        assert "missed rank 1 for 1 s: ranks 0, 2 voted" in text


# ---------------------------------------------------------------- without the launcher

SCRIPT_HEAD = """
import os, signal, sys, time
from datetime import timedelta
from headway import Accelerator
from headway.errors import ControlPlaneError
from headway.core.runtime.control_plane import control
accelerator = Accelerator(cpu=True)
plane = control.current()
plane.vote([0.0])
"""


def run_without_launcher(folder, body):
    """Run two ranks without a launcher, and return their exit codes and what they wrote to stderr."""
    (folder / "plain.py").write_text(SCRIPT_HEAD + body)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "plain.py"], cwd=folder, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


def test_abort_ends_ranks_that_wait_elsewhere(tmp_path):
    body = "if plane.rank == 1:\n    plane.abort('the disk is full')\ntime.sleep(100)\n"
    codes, errors = run_without_launcher(tmp_path, body)
    assert codes == [1, 1]
    assert all(
        "headway: rank 1 of 2 (host " in error and "ended the run: the disk is full" in error for error in errors
    )


def test_death_of_the_control_plane_host_is_reported(tmp_path):
    body = """
plane.vote([0.0])  # rank 1 has arrived
if plane.rank == 0:
    time.sleep(2)  # and has received the result
    os.kill(os.getpid(), signal.SIGKILL)
try:
    plane.vote([1.0])
except ControlPlaneError as error:
    print("caught:", error, file=sys.stderr)
time.sleep(1)
os._exit(3)
"""
    codes, errors = run_without_launcher(tmp_path, body)
    assert codes == [-signal.SIGKILL, 3]
    assert "headway: rank 0, which hosted the control plane, is gone" in errors[1]
    assert "caught: rank 0, which hosted the control plane, is gone" in errors[1]


def test_normal_exit_is_not_reported_as_a_death(tmp_path):
    codes, errors = run_without_launcher(tmp_path, "time.sleep(plane.rank)\n")
    assert codes == [0, 0]
    assert not any("gone" in error for error in errors)


# ---------------------------------------------------------------- with the launcher

LAUNCHED = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if sys.argv[1] == "leaves" and rank == 1:
    sys.exit(0)
if sys.argv[1] == "hangs" and rank == 1:
    time.sleep(100)
from headway import Accelerator
from headway.core.runtime.control_plane import control
Accelerator(cpu=True)
plane = control.current()
control.note_progress(12, 3)
if sys.argv[1] == "aborts":
    if rank == 1:
        plane.abort("the disk is full")
    time.sleep(100)
if sys.argv[1] == "fails":
    if rank == 1:
        raise ValueError("bad luck")
    plane.vote([1.0])
if sys.argv[1] == "restarts":
    assert not plane.has_key("mark"), "an old attempt's key"
    for number in range(20):
        assert plane.vote([number, rank], "sum") == [2 * number, 1]
    plane.set("mark", b"1")
    plane.vote([0.0])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("attempt", attempt, "came through")
    if attempt < 2:
        if rank == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        plane.vote([1.0])
"""


def test_failure_report_contains_the_update(tmp_path):
    processes = launch(tmp_path, LAUNCHED, "--cpu", "-n", "2", "--log_dir", "logs", args=("fails",))
    assert processes.returncode == 1
    assert "rank 1 of 2 failed first, at train.py:19 (host " in processes.stderr
    assert ", update 12" in processes.stderr.splitlines()[1]
    failure = json.loads((tmp_path / "logs/failure.json").read_text())
    assert "update 12" in failure["first"]["progress"]


def test_abort_reason_is_the_report(tmp_path):
    processes = launch(
        tmp_path, LAUNCHED, "--cpu", "-n", "2", "--log_dir", "logs", "--max_restarts", "3", args=("aborts",)
    )
    assert processes.returncode == 1
    assert processes.stderr.count("ended the run: the disk is full") == 1
    assert "headway: rank 1 of 2 (host " in processes.stderr
    assert "restarting all processes" not in processes.stderr
    assert "the disk is full" in json.loads((tmp_path / "logs/failure.json").read_text())["reason"]


@pytest.mark.parametrize(("behavior", "words"), [
    ("leaves", "rank 1 ended with exit code 0 before it joined the run"),
    ("hangs", "within the timeout of 5 s"),
])  # fmt: skip
def test_missing_rank_and_both_counts_are_reported(tmp_path, behavior, words):
    processes = launch(tmp_path, LAUNCHED, "--cpu", "-n", "2", "--timeout", "5", args=(behavior,))
    assert processes.returncode == 1
    assert words in processes.stderr
    assert "2 processes were asked for and 1 has come" in processes.stderr
    assert "missing rank 1" in processes.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_restarted_attempt_does_not_see_old_keys(tmp_path):
    process = start_launch(tmp_path, LAUNCHED, "--cpu", "-n", "2", "--max_restarts", "2", args=("restarts",))
    out, err = process.communicate(timeout=590)
    assert process.returncode == 0, err
    arrivals = [line for line in out.splitlines() if line.startswith("attempt")]
    # The launcher may kill the other rank before it prints.
    assert set(arrivals) == {f"attempt {number} came through" for number in range(3)}
    assert arrivals.count("attempt 2 came through") == 2
    assert err.count("was ended by SIGKILL") == 2


@pytest.mark.slow
def test_every_machine_reports_the_first_failure(tmp_path):
    flags = ("--cpu", "-n", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1",
             "--main_process_port", str(free_port()), "--log_dir")  # fmt: skip
    processes = [
        start_launch(tmp_path, LAUNCHED, *flags, f"logs{machine}", "--machine_rank", str(machine), args=("fails",),
              GLOO_SOCKET_IFNAME="lo")
        for machine in range(2)
    ]  # fmt: skip
    for machine, process in enumerate(processes):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1, errors
        assert "rank 1 of 2 failed first, at train.py:19 (host " in errors
        assert "ValueError: bad luck" in errors
        failure = json.loads((tmp_path / f"logs{machine}/failure.json").read_text())
        assert (failure["first"]["rank"], failure["first"]["record"]["text"]) == (1, "bad luck")
