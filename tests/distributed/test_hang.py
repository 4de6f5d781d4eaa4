"""Real hangs: the report names the missing rank, its line and the operation of the others. Also cases that are no hangs."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port
from tests.distributed.test_launch import start_launch, wait_until_gone

TIMEOUT = 6  # also covers rendezvous, during which up to eight ranks import torch

PLAIN_TORCH = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
print("pid", os.getpid(), flush=True)
dist.init_process_group("gloo")
value = torch.ones(4)
for step in range(3):
    dist.all_reduce(value)
"""

HEADWAY = """
import os, time, torch
from headway import Accelerator
print("pid", os.getpid(), flush=True)
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
accelerator.gather(torch.ones(1))
"""


# There is no GPU, so NCCL's flight recorder is replaced: two ranks enqueue operations, and rank 0 waits for its device.
# The recorder is replaced before the group exists, because Headway looks it up once.
DEVICE = (
    f"""
import sys, threading
sys.path.append({str(Path(__file__).parents[2])!r})
from tests.unit.core.runtime.nccl_dump import make_dump, make_entry
import torch._C._distributed_c10d as engine
queue = [make_entry(1, "broadcast", "completed"), make_entry(2, "all_reduce", "completed")]
engine._dump_nccl_trace_json = lambda all=True: make_dump(queue, all)
"""
    + PLAIN_TORCH
)


@dataclass(frozen=True)
class Case:
    """Script for two ranks, of which rank 1 does not reach an operation. The marks GONE and WAITS show their lines."""

    body: str
    operation: str
    expected: tuple[str, ...] = ()


HANGS = {
    "sleep": Case(PLAIN_TORCH + """
def evaluate():
    if rank == 1:
        time.sleep(300)  # GONE
evaluate()
dist.all_reduce(value)  # WAITS
""", "all_reduce", ("is at train.py:{gone} in evaluate", "it sleeps there")),
    "C code": Case(PLAIN_TORCH + """
def compute():
    return sum(range(10**13))  # GONE
if rank == 1:
    compute()
dist.all_reduce(value)  # WAITS
""", "all_reduce", ("holds the interpreter lock in C code (no heartbeat for ", "it is at train.py:{gone} in compute")),
    "stopped": Case(PLAIN_TORCH + """
import signal
def halt():
    for _ in range(25):
        time.sleep(0.1)  # GONE
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    halt()
dist.barrier()  # WAITS
""", "barrier", ("is stopped (process state T", "it was at train.py:{gone} in halt", "kill -CONT")),
    "before the group": Case("""
import os, time, torch.distributed as dist
print("pid", os.getpid(), flush=True)
if os.environ["RANK"] == "1":
    time.sleep(300)  # GONE
dist.init_process_group("gloo")  # WAITS
""", "init_process_group", ("is at train.py:{gone}",)),
    "left the loop": Case(HEADWAY + """
def train():
    for step in range(5):
        if step == 3 and rank == 1:
            break
        accelerator.gather(torch.ones(1))  # WAITS
def finish():
    while True:
        time.sleep(1)  # GONE
train()
finish()
""", "gather", ("is at train.py:{gone} in finish", "it has left the loop of train.py:10 in train")),
    "main process only": Case(HEADWAY + """
loss = torch.ones(1)
if accelerator.is_main_process:
    accelerator.gather(loss)  # WAITS
while rank == 1:
    time.sleep(1)  # GONE
""", "gather", ("is at train.py:{gone}", "under `if accelerator.is_main_process:` (train.py:10), which not every rank passes")),
    "data": Case(HEADWAY + """
class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if rank == 1 and index > 3 and has_begun:
            os.read(os.pipe()[0], 1)  # GONE
        return torch.ones(2)
has_begun = False  # prepare() reads a few samples, too
for batch in accelerator.prepare(torch.utils.data.DataLoader(Files(), batch_size=1)):
    has_begun = True
    accelerator.reduce(batch)  # WAITS
""", "reduce", ("waits for data at train.py:{gone} in __getitem__", "the dataset has not returned from this line")),
    "gradients": Case(HEADWAY + """
from headway import DataLoaderConfiguration
engine = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(4):
    if step == 3 and rank == 1:
        time.sleep(300)  # GONE
    engine(torch.ones(2, 2)).sum().backward()  # WAITS
""", "all_reduce", ("is at train.py:{gone}", "of the gradients at")),
    "device": Case(DEVICE + """
if rank == 0:
    queue.extend(make_entry(number, "all_reduce" if number == 3 else "broadcast") for number in range(3, 20))
else:
    time.sleep(300)  # GONE
threading.Event().wait()  # WAITS
""", "all_reduce", ("is at train.py:{gone}", "waits in all_reduce #3 at")),
}  # fmt: skip


def run_script(folder: Path, body: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], float]:
    folder.mkdir()
    process = start_launch(
        folder, body, "--cpu", "-n", "2", "-q", "--log_dir", "logs", "--timeout", str(TIMEOUT), *flags
    )
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err), time.time()


def run_all(
    folder: Path, bodies: dict[str, str], **flags: list[str]
) -> dict[str, tuple[subprocess.CompletedProcess[str], float]]:
    """Run all scripts, four at a time, because they mostly wait. Return each result and the time at which it ended."""
    with ThreadPoolExecutor(4) as pool:
        result = {
            name: pool.submit(run_script, folder / name.replace(" ", "_"), body, *flags.get(name, ()))
            for name, body in bodies.items()
        }
        return {name: future.result() for name, future in result.items()}


def find_line(body: str, mark: str) -> int:
    return next(number for number, line in enumerate(body.splitlines(), 1) if mark in line)


QUICK = ("sleep", "C code", "stopped", "data", "device")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="few"),
        pytest.param([name for name in HANGS if name not in QUICK], id="the others", marks=pytest.mark.matrix),
    ],
)
def test_hang_report_names_the_missing_rank(names, tmp_path):
    # The waiting rank records when it begins to wait, so that the time of startup does not count.
    bodies = {
        name: re.sub(r"^( *)(.*# WAITS)$", r"\1if rank == 0: open('since', 'w').write(str(time.time()))\n\1\2", case.body,
                     flags=re.MULTILINE).replace("if rank == 0: open", "os.environ['RANK'] == '0' and open")
        for name, case in HANGS.items() if name in names
    }  # fmt: skip
    for name, (result, ended) in run_all(tmp_path, bodies).items():
        case, body = HANGS[name], bodies[name]
        gone, waits = find_line(body, "# GONE"), find_line(body, "# WAITS")
        shown = f"{name}:\n{result.stderr}"
        assert result.returncode == 1, shown
        headline = (
            f"headway: this run hangs: rank 1 of 2 is missing from {case.operation}, where rank 0 has waited for "
        )
        assert headline in result.stderr, shown
        assert re.search(
            rf"rank 0 \(host .*, pid \d+\) waits in {case.operation}.* at train.py:{waits}", result.stderr
        ), shown
        for text in case.expected:
            assert text.format(gone=gone) in result.stderr, shown
        assert "Traceback" not in result.stderr, shown
        since = float((tmp_path / name.replace(" ", "_") / "since").read_text())
        assert ended - since < TIMEOUT + 10 + 60, (
            shown
        )  # allows a minute for a busy machine; an idle one takes six seconds
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", result.stdout)]
        assert len(pids) == 2, shown
        assert wait_until_gone(pids) == [], shown
        failure = json.loads((tmp_path / name.replace(" ", "_") / "logs/failure.json").read_text())
        assert [view["rank"] for view in failure["hang"]["missing"]] == [1]
        assert [view["rank"] for view in failure["hang"]["waiting"]] == [0]


OTHER_CASES = {
    "order": PLAIN_TORCH + """
if rank == 0:
    dist.all_reduce(value)
else:
    dist.broadcast(value, 1)
    dist.broadcast(value, 0)
dist.barrier()
""",
    "finished": HEADWAY + """
for step in range(5):
    if step == 3 and rank == 1:
        break
    accelerator.gather(torch.ones(1))
""",
    "restarted": PLAIN_TORCH + """
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(300)
dist.all_reduce(value)
""",
    "no hang": HEADWAY + """
import sys, threading
end = time.monotonic() + 1.5 * 6
while time.monotonic() < end:  # a long computation everywhere
    torch.ones(64, 64) @ torch.ones(64, 64)
if rank == 0:
    time.sleep(1)  # an evaluation on one rank
accelerator.wait_for_everyone()
class Slow:
    def __init__(self):
        self.file = open("big.pt", "wb")
    def write(self, data):
        time.sleep(0.15)
        self.file.write(data)
        self.file.flush()
        return len(data)
    def flush(self):
        pass
if rank == 1:
    torch.save([torch.ones(100) for _ in range(20)], Slow())
accelerator.wait_for_everyone()
if rank == 1:
    keyboard, keys = os.pipe()
    sys.stdin = os.fdopen(keyboard)
    threading.Timer(1.8 * 6, os.write, (keys, b"c\\n")).start()
    breakpoint()
    time.sleep(1)  # BUG
accelerator.wait_for_everyone()
""",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_hangs_and_cases_without_a_hang(tmp_path):
    found = {
        name: result for name, (result, _) in run_all(tmp_path, OTHER_CASES, restarted=["--max_restarts", "1"]).items()
    }
    shown = {name: f"{name}: {result.returncode}\n{result.stdout}\n{result.stderr}" for name, result in found.items()}
    assert found["order"].returncode == 1, shown["order"]
    assert "but not in the same operation: their order differs" in found["order"].stderr, shown["order"]
    assert "waits in all_reduce #4 at train.py:11" in found["order"].stderr, shown["order"]
    assert re.search("waits in broadcast #[45] at train.py:1[34]", found["order"].stderr), shown["order"]
    assert "rank 1 had finished the script by then" in found["finished"].stderr, shown["finished"]
    assert found["restarted"].returncode == 0, shown["restarted"]
    assert "rank 1 of 2 is missing from all_reduce" in found["restarted"].stderr, shown["restarted"]
    assert "restarting all processes (1 of 1 restarts)" in found["restarted"].stderr, shown["restarted"]
    calm = found["no hang"]
    assert calm.returncode == 0, shown["no hang"]
    assert "hangs" not in calm.stderr, shown["no hang"]
    bug = find_line(OTHER_CASES["no hang"], "# BUG")
    assert f"rank 1 keeps the others waiting at train.py:{bug}: a debugger has stopped it" in calm.stderr, shown[
        "no hang"
    ]
    assert calm.stderr.count("keeps the others waiting") == 1, shown["no hang"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_report_a_hang_without_the_launcher(tmp_path):
    case = HANGS["main process only"]
    (tmp_path / "train.py").write_text(case.body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    common = {
        **kept, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "HEADWAY_TIMEOUT": str(TIMEOUT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE, text=True,
        ) for rank in "01"
    ]  # fmt: skip
    try:
        expected = [process.communicate(timeout=280)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1], expected
    for text in expected:
        assert "rank 1 of 2 is missing from gather, where rank 0 has waited for " in text
        assert f"is at train.py:{find_line(case.body, '# GONE')}" in text
        assert "under `if accelerator.is_main_process:` (train.py:10)" in text
