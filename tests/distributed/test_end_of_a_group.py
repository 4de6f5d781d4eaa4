"""Exit of processes whose backend waits for its peers, as NCCL does. A gloo backend stands in for it.

`destroy_process_group` is replaced by a function that never returns, as NCCL's does while peers are inside a collective.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.ranks import free_port
from tests.distributed.test_launch import start_launch

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
tracker = Tracker()  # Headway's trackers flush their records in this way
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
time.sleep(600)  # in place of a collective on the device
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
process.leave_group()  # as a batch size search does when memory runs out
process.join_group()
if rank == 1:""",
)

FAILS_WITH_OWN_HOOK = FAILS.replace(
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
signal.raise_signal(signal.SIGINT)  # Ctrl-C reaches all ranks, at different places in the program
"""
)


def launch_and_wait(folder, body):
    began = time.monotonic()
    process = start_launch(folder, body, "--cpu", "-n", "2", "-q", "--log_dir", "logs")
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err, time.monotonic() - began


def start_without_launcher(folder, body, ranks="01"):
    """Start ranks without a launcher, and return their processes."""
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


def wait_for_end(process, seconds=60):
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failure_ends_the_run_at_once(tmp_path):
    code, out, err, took = launch_and_wait(tmp_path, FAILS)
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
def test_failure_that_the_script_catches_ends_the_run(tmp_path):
    code, out, err, took = launch_and_wait(tmp_path, CATCHES.replace("CODE", "3"))
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
def test_failing_rank_without_the_launcher_runs_its_exit_functions_once(tmp_path, body):
    """Python runs all `atexit` functions of the process once, and the exit code is unchanged."""
    processes = start_without_launcher(tmp_path, body)
    try:
        code, out, err = wait_for_end(processes[1])
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
        pytest.param(FAILS_WITH_OWN_HOOK, id="below a hook", marks=pytest.mark.matrix),
    ],
)
def test_whole_error_is_printed_before_the_process_ends(tmp_path, body):
    """With each new group, torch installs an excepthook that delays output, above the hooks of Headway and the script."""
    processes = start_without_launcher(tmp_path, body)
    try:
        code, _, err = wait_for_end(processes[1])
    finally:
        processes[0].kill()
        processes[0].communicate()
    assert code == 1, err
    assert err.count("ValueError: no such sample") == 1, err
    assert err.count("the script's own hook") == (body is FAILS_WITH_OWN_HOOK), err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_ranks_without_the_launcher_exit_by_the_signal(tmp_path):
    """All ranks reach their end, but may have started different device operations, so no rank destroys the group."""
    processes = start_without_launcher(tmp_path, INTERRUPTED)
    try:
        ends = [wait_for_end(process) for process in processes]
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
def test_ranks_that_end_together_destroy_the_group(tmp_path):
    code, out, err, _ = launch_and_wait(tmp_path, SCRIPT.replace("IS_CALM", "True"))
    assert code == 0, err
    assert all(f"rank {rank}: destroyed\n" in out for rank in range(2)), out
