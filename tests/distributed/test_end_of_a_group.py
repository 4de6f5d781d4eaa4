"""How processes end whose group has an engine that waits for its peers, as NCCL does; here a gloo of that name, in the GPU's place.

What NCCL's `destroy_process_group` does while peers are inside a collective is stubbed: it does not come back.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.ranks import free_port
from tests.distributed.test_launch import begin

SCRIPT = """
import atexit, os, sys, time, weakref
atexit.register(lambda: print(f"rank {os.environ['RANK']}: registered first", flush=True))
import torch, torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from headway import Accelerator, InitProcessGroupKwargs
dist.Backend.register_backend(
    "card", lambda store, rank, size, timeout: ProcessGroupGloo(store, rank, size, timeout), devices=["cuda"])
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:card")])
rank = accelerator.process_index
really = dist.destroy_process_group
def destroy(group=None):
    if not IS_CALM:
        time.sleep(600)  # peers are inside a kernel
    print(f"rank {rank}: destroyed", flush=True)
    really(group)
dist.destroy_process_group = destroy
atexit.register(lambda: print(f"rank {rank}: registered last", flush=True))
class Tracker:
    pass
tracker = Tracker()  # as ours write what they hold
weakref.finalize(tracker, print, f"rank {rank}: tracker flushed", flush=True)
kept = open(f"written{rank}", "w")
kept.write("all of it")
accelerator.wait_for_everyone()
"""

FAILS = (
    SCRIPT.replace("IS_CALM", "False")
    + """
if rank == 1:
    raise ValueError("no such sample")
time.sleep(600)  # stands in a collective on the device
"""
)

CATCHES = (
    SCRIPT.replace("IS_CALM", "False")
    + """
try:
    if rank == 1:
        raise ValueError("no such sample")
    time.sleep(600)
except ValueError as error:
    print(f"rank {rank}: caught {error}", flush=True)
    sys.exit(CODE)
"""
)


FAILS_LATER = FAILS.replace(
    "if rank == 1:",
    """
from headway.core.runtime import process
process.leave_group()  # as a batch-size search does, where memory ran out
process.join_group()
if rank == 1:""",
)

FAILS_BELOW_A_HOOK = FAILS.replace(
    "if rank == 1:",
    """
former = sys.excepthook
def hook(*args):
    former(*args)
    print("the script's own hook", file=sys.stderr)
sys.excepthook = hook
if rank == 1:""",
)

INTERRUPTED = (
    SCRIPT.replace("IS_CALM", "False")
    + """
import signal
signal.raise_signal(signal.SIGINT)  # Ctrl-C reaches all ranks, each at another place in the program
"""
)


def launched(folder, body):
    began = time.monotonic()
    process = begin(folder, body, "--cpu", "-n", "2", "-q", "--log_dir", "logs")
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err, time.monotonic() - began


def alone(folder, body, ranks="01"):
    """Ranks that no launcher keeps."""
    (folder / "train.py").write_text(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    common = {
        **kept, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for rank in ranks
    ]  # fmt: skip


def end_of(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_ends_the_run_at_once(tmp_path):
    code, out, err, took = launched(tmp_path, FAILS)
    assert (code, took < 60) == (1, True), err
    assert "rank 1 of 2 failed first, at train.py:" in err
    assert "ValueError: no such sample" in err
    assert err.count("Traceback") == 1
    assert "rank 1: registered last\n" in out
    assert "rank 1: registered first\n" in out
    assert "rank 1: tracker flushed\n" in out
    assert "destroyed" not in out
    assert (tmp_path / "written1").read_text() == "all of it"
    failure = json.loads((tmp_path / "logs/failure.json").read_text())
    assert failure["exit_code"] == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_that_the_script_catches(tmp_path):
    code, out, err, took = launched(tmp_path, CATCHES.replace("CODE", "3"))
    assert (code, took < 60) == (3, True), err
    assert "rank 1: caught no such sample" in out
    assert "rank 1: registered first\n" in out
    assert "destroyed" not in out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(FAILS, id="uncaught"),
        pytest.param(CATCHES.replace("CODE", "0"), id="caught", marks=pytest.mark.matrix),
    ],
)
def test_without_the_launcher(tmp_path, body):
    """A process that Python itself ends: all functions of atexit run, once, and the exit code is what it would have been."""
    processes = alone(tmp_path, body)
    try:
        code, out, err = end_of(processes[1])
    finally:
        processes[0].kill()
        processes[0].communicate()
    assert code == (1 if body is FAILS else 0), err
    assert err.count("ValueError: no such sample") == (1 if body is FAILS else 0), err
    assert [line for line in out.splitlines() if "registered" in line] == [
        "rank 1: registered last",
        "rank 1: registered first",
    ]
    assert out.count("rank 1: tracker flushed\n") == 1
    assert "destroyed" not in out
    assert (tmp_path / "written1").read_text() == "all of it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(FAILS_LATER, id="later group"),
        pytest.param(FAILS_BELOW_A_HOOK, id="below a hook", marks=pytest.mark.matrix),
    ],
)
def test_all_is_said_before_a_process_ends(tmp_path, body):
    """torch puts its hook, which holds back what is printed until all has returned, above ours with every group."""
    processes = alone(tmp_path, body)
    try:
        code, _, err = end_of(processes[1])
    finally:
        processes[0].kill()
        processes[0].communicate()
    assert code == 1, err
    assert err.count("ValueError: no such sample") == 1, err
    assert err.count("the script's own hook") == (body is FAILS_BELOW_A_HOOK), err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_are_interrupted_without_the_launcher(tmp_path):
    """All come to their end, but what one has begun on the device another has not: nobody ends the group."""
    processes = alone(tmp_path, INTERRUPTED)
    try:
        ends = [end_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for code, out, err in ends:
        assert code == -signal.SIGINT, err
        assert err.count("headway: stopped by Ctrl-C at ") == 1, err
        assert "registered first\n" in out
        assert "destroyed" not in out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_end_together_end_the_group(tmp_path):
    code, out, err, _ = launched(tmp_path, SCRIPT.replace("IS_CALM", "True"))
    assert code == 0, err
    assert all(f"rank {rank}: destroyed\n" in out for rank in range(2)), out
