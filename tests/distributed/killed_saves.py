"""Kill checkpoint saves at a chosen system call. Run as `killed_saves.py FOLDER VARIANT...`; prints JSON.

Each attempt runs in a fork of this process, which has imported torch. strace attaches to the fork and sends SIGKILL at
the n-th call of one kind. Afterwards, the newest checkpoint must load and verify, and hold only the old or only the new
values. The next save must leave only checkpoints in the folder. The sweep over n ends once a save survives.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from headway.core.checkpoint import folders
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.saving.job import SavePolicy
from headway.core.checkpoint.saving.saver import Saver
from headway.core.checkpoint.state import CollectedState
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.weights import parallel_writer
from tests.unit.core.checkpoint.reading import read_tensors

CALLS = ("write", "pwrite64", "fsync", "rename", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir")
VARIANTS = {
    "blocking": {"world_size": 1, "is_blocking": True, "same_name": False},
    "behind": {"world_size": 1, "is_blocking": False, "same_name": False},
    "exchange": {"world_size": 1, "is_blocking": True, "same_name": True},
    "exchange behind": {"world_size": 1, "is_blocking": False, "same_name": True},
    "two ranks exchange": {"world_size": 2, "is_blocking": True, "same_name": True},
    "two ranks": {"world_size": 2, "is_blocking": True, "same_name": False},
    "two ranks behind": {"world_size": 2, "is_blocking": False, "same_name": False},
    "threads": {"world_size": 1, "is_blocking": True, "same_name": True, "has_threads": True},
    "threads behind": {"world_size": 1, "is_blocking": False, "same_name": False, "has_threads": True},
}
"""Saves to test. `has_threads`: several threads write each file, as they do for large files."""


def make_state(value: int) -> CollectedState:
    tensors = {f"model/0/{i}": torch.full((1000,), float(value)) for i in range(3)}
    tensors["optimizer/0/0/exp_avg"] = torch.full((3000,), float(value))
    return CollectedState(tensors, {}, {"value": value})


def choose_writer(variant: dict) -> None:
    """Make several threads write even small files in this process, or one thread write all files."""
    parallel_writer._MIN_THREADED_BYTES = 0 if variant.get("has_threads") else 2**40


def save(root: Path, value: int, variant: dict) -> None:
    runtime = process.start(cpu=True)
    saver = Saver(runtime, Collectives(runtime))
    final = root / ("checkpoint_1" if variant["same_name"] else f"checkpoint_{value}")
    choose_writer(variant)
    saver.save(final, make_state(value), {"value": value}, SavePolicy(1, (), True, variant["is_blocking"]))
    saver.wait()


def read_newest_value(root: Path) -> int:
    """Return the value in the newest checkpoint. Fail unless the checkpoint is complete and consistent."""
    newest = folders.list_committed(root)[0]
    manifest = verify_checkpoint(newest)
    values = {t.unique().item() for _, t in read_tensors(newest, manifest)}
    assert len(values) == 1, values
    value = values.pop()
    assert manifest.about["value"] == manifest.state["value"] == value
    return int(value)


def run_rank(root: Path, variant: dict, rank: int, port: int, gate: int, go: int) -> None:
    """Save on one rank and exit the forked process. Never returns to the parent's code."""
    world = variant["world_size"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    code = 3
    try:
        with open(root.parent / f"rank{rank}.log", "w") as sink:
            os.dup2(sink.fileno(), 2)
        process.reset()
        process.start(cpu=True)
        os.write(gate, b"r")
        os.read(go, 1)  # until strace is attached
        save(root, 2, variant)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def save_with_kill(root: Path, variant: dict, victim: int, call: str, when: int) -> bool:
    """Save once, with a kill at the n-th call on one rank. Return whether all ranks survived."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A rank waits in a read instead of being stopped, because the other rank may need answers from its threads.
    gate_out, gate_in = os.pipe()
    go_out, go_in = os.pipe()
    pids = []
    for rank in range(variant["world_size"]):
        pid = os.fork()
        if pid == 0:
            run_rank(root, variant, rank, port, gate_in, go_out)
        pids.append(pid)
    for _ in pids:
        os.read(gate_out, 1)
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={when}",
         "-p", str(pids[victim])], stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_tracer(pids[victim])
    os.write(go_in, b"g" * len(pids))
    for end in (gate_out, gate_in, go_out, go_in):
        os.close(end)
    codes = [os.waitpid(pids.pop(victim), 0)[1]]
    if codes[0] != 0:  # a launcher would kill the other ranks a moment later
        time.sleep(0.05)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    codes += [os.waitpid(pid, 0)[1] for pid in pids]
    tracer.wait()
    return all(code == 0 for code in codes)


def wait_for_tracer(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
                return
        time.sleep(0.005)
    raise RuntimeError("strace did not attach")


def sweep_kills(folder: Path, name: str) -> dict:
    variant, counts = VARIANTS[name], {"kills": 0, "old": 0, "new": 0}
    for victim, call in itertools.product(range(variant["world_size"]), CALLS):
        for when in itertools.count(1):
            root = folder / "root"
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            save(root, 1, {**variant, "is_blocking": True})
            has_survived = save_with_kill(root, variant, victim, call, when)
            value = read_newest_value(root)
            assert value in ((2,) if has_survived else (1, 2)), (name, call, when, value)
            save(root, 3, variant)
            assert read_newest_value(root) == 3
            left = sorted(path.name for path in root.iterdir())
            assert left == ["checkpoint_1" if variant["same_name"] else "checkpoint_3", "latest"], (
                name,
                call,
                when,
                left,
            )
            if has_survived:
                break
            counts["kills"] += 1
            counts["old" if value == 1 else "new"] += 1
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    # This process makes the first and the third save with a world size of 1.
    print(json.dumps({name: sweep_kills(Path(sys.argv[1]) / name.replace(" ", "-"), name) for name in sys.argv[2:]}))
