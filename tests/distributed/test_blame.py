"""Hangs for which an earlier version named the wrong rank or none: in saves, and after the script's end. Also leftover processes."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.distributed.test_hang import HEADWAY, TIMEOUT, find_line, run_all
from tests.distributed.test_launch import start_launch, wait_until_gone

MODEL = (
    HEADWAY
    + """
model = accelerator.prepare(torch.nn.Linear(2, 2))
"""
)

# A FIFO in place of a checkpoint file: writing to it blocks.
CLOGGED = (
    MODEL
    + """
def clog(models, weights, folder):
    if rank in {who}:
        for kind in ("model", "loaders", "streams"):
            os.mkfifo(f"{{folder}}/{{kind}}-0000{{rank}}.safetensors")
accelerator.register_save_state_pre_hook(clog)
accelerator.save_state("one", blocking={blocking})  # FIRST
accelerator.save_state("two", blocking={blocking})  # GONE
"""
)

CASES = {
    "state_dict": MODEL + """
class Slow:
    def state_dict(self):
        if rank == 1:
            time.sleep(300)  # GONE
        return {}
    def load_state_dict(self, state):
        pass
accelerator.register_for_checkpointing(Slow())
accelerator.save_state("one")  # WAITS
""",
    "hook": MODEL + """
def hook(*_):
    if rank == 1:
        time.sleep(300)  # GONE
accelerator.register_save_state_pre_hook(hook)
accelerator.save_state("one")  # WAITS
""",
    "behind, rank 1": CLOGGED.format(who=(1,), blocking=False),
    "behind, rank 0": CLOGGED.format(who=(0,), blocking=False),
    "in step, rank 1": CLOGGED.format(who=(1,), blocking=True),
    "exit function": HEADWAY + """
import atexit
def tidy():
    if rank == 1:
        time.sleep(300)  # GONE
atexit.register(tidy)
""",
    "thread": HEADWAY + """
import threading
def upload():
    time.sleep(300)  # GONE
if rank == 1:
    threading.Thread(target=upload).start()
""",
    "failed, with a thread": HEADWAY + """
import threading
if rank == 1:
    threading.Thread(target=time.sleep, args=(300,)).start()
    raise ValueError("this one is wrong")  # GONE
accelerator.gather(torch.ones(1))
""",
}  # fmt: skip
FEW = ("state_dict", "behind, rank 1", "exit function", "failed, with a thread")
"""One case of each kind, for `make test`."""
SAVES = ("state_dict", "hook", "behind, rank 1", "behind, rank 0", "in step, rank 1")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="one of each kind"),
        pytest.param([each for each in CASES if each not in FEW], id="the others", marks=pytest.mark.matrix),
    ],
)
def test_hang_report_names_the_rank_that_blocks_the_others(names, tmp_path):
    results = {name: found for name, (found, _) in run_all(tmp_path, {name: CASES[name] for name in names}).items()}
    shown = {name: f"{name}:\n{found.stdout}\n{found.stderr}" for name, found in results.items()}
    assert {name: found.returncode for name, found in results.items()} == dict.fromkeys(names, 1), "\n".join(
        shown.values()
    )
    for name, found in results.items():
        text = shown[name]
        assert wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", found.stdout)]) == [], text
        if name != "failed, with a thread":
            assert "Traceback" not in text
    for name in [each for each in SAVES if each in names]:
        culprit = 0 if name == "behind, rank 0" else 1
        assert f"this run hangs: rank {culprit} of 2 is missing from" in results[name].stderr, shown[name]
        mark = "# FIRST" if name == "in step, rank 1" else "# GONE"
        assert f") is at train.py:{find_line(CASES[name], mark)}" in results[name].stderr, shown[name]
    for name in [each for each in SAVES[2:] if each in names]:
        assert "it writes a checkpoint, and no byte has moved for" in results[name].stderr, shown[name]
    for name in [each for each in ("exit function", "thread") if each in names]:
        assert "this run does not end: rank 1 of 2 has come to the end of the script" in results[name].stderr, shown[
            name
        ]
        assert f"is at train.py:{find_line(CASES[name], '# GONE')}" in results[name].stderr, shown[name]
    if "failed, with a thread" in names:
        failed = results["failed, with a thread"].stderr
        assert "rank 1 of 2 failed first" in failed
        assert "ValueError: this one is wrong" in failed
        assert "hangs" not in failed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unresponsive_disk_is_reported_and_the_run_waits(tmp_path):
    body = CLOGGED.format(who=(0, 1), blocking=False).replace('save_state("two"', 'save_state("one"')
    process = start_launch(tmp_path, body, "--cpu", "-n", "2", "-q", "--timeout", str(TIMEOUT))
    try:
        line = process.stderr.readline()
        assert "ranks 0-1 have not written a byte of a checkpoint for" in line
        assert "its file system does not answer" in line
        folders = list(tmp_path.glob(".staging-one-*"))
        fifos = [path for folder in folders for path in folder.glob("*.safetensors")]
        # The first rank to continue fails and deletes the folder. All pipes are therefore held open before any is read.
        held = [os.open(path, os.O_PATH) for path in fifos]
        readers = [
            os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK) for pipe in held
        ]  # unblocks the writers
        assert len(readers) == 6
        _, err = process.communicate(timeout=120)
        for descriptor in held + readers:
            os.close(descriptor)
    finally:
        process.kill()
    # A pipe cannot be synced to disk, so the ranks then fail and report it.
    assert process.returncode == 1
    assert "could not be written" in err
    assert "hangs" not in err


FROZEN = (
    MODEL
    + """
import subprocess, sys
if rank == 0:
    subprocess.run(["fsfreeze", "-f", sys.argv[1]], check=True)
accelerator.wait_for_everyone()
accelerator.save_state(sys.argv[1] + "/one", blocking=False)  # GONE
"""
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hang_report_names_the_rank_that_waits_for_a_frozen_file_system(tmp_path):
    disk, image = tmp_path / "disk", tmp_path / "disk.img"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(20 << 20)
    tools = all(map(shutil.which, ("mkfs.ext4", "fsfreeze", "mount")))
    if not tools or subprocess.run(["mkfs.ext4", "-q", image]).returncode:
        pytest.skip("mkfs.ext4, fsfreeze or mount is missing")
    if subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        process = start_launch(tmp_path, FROZEN, "--cpu", "-n", "2", "-q", "--timeout", str(TIMEOUT), args=(str(disk),))
        process.wait(200)
    finally:
        process.kill()
        subprocess.run(["fsfreeze", "-u", disk])
        out, err = process.communicate(timeout=60)  # the rank stuck in the kernel keeps our pipes open
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
        still = wait_until_gone(pids, 30)
        subprocess.run(["umount", disk], check=True)
    assert process.returncode == 1, err
    assert "rank 0 of 2 is missing from" in err
    assert f"is at train.py:{find_line(FROZEN, '# GONE')}" in err
    assert "process state D" in err
    assert "until its disk answers" in err
    assert still == []


CHILDREN = (
    HEADWAY
    + """
import subprocess
from torch.utils.data import DataLoader
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
batches = iter(DataLoader(range(100), num_workers=1, multiprocessing_context="fork"))
next(batches)
if rank == 1:
    import signal
    worker = batches._workers[0].pid
    print("child", worker, flush=True)
    os.kill(worker, signal.SIGSTOP)
    raise ValueError("this one is wrong")
accelerator.gather(torch.ones(1))
"""
)


def test_no_process_is_left_after_a_failure(tmp_path):
    process = start_launch(tmp_path, CHILDREN, "--cpu", "-n", "2", "-q")
    out, err = process.communicate(timeout=120)
    children = [int(pid) for pid in re.findall(r"child (\d+)", out)]
    try:
        assert process.returncode == 1, err
        assert "ValueError: this one is wrong" in err
        assert len(children) == 3
        assert wait_until_gone(children) == []
    finally:
        for pid in wait_until_gone(children, 0):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_signal_after_success_does_not_change_the_exit_code(tmp_path):
    delays = (0.0, 0.06, 0.25)
    codes = []
    for delay in delays:
        process = start_launch(tmp_path, "import os; print(os.getpid(), flush=True)", "--cpu", "-n", "2", "-q")
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert wait_until_gone(pids, 60) == []
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        codes.append((process.returncode, err))
    assert codes == [(0, "")] * len(delays)
