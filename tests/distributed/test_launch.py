"""Real launches with one and with several processes: failures are reported once, and no process is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.launch.clusters import detect_cluster

# Each rank prints its settings,
REPORT = """
import json, os, sys, time
rank = int(os.environ["RANK"])
print(json.dumps({"rank": rank, "world": os.environ["WORLD_SIZE"], "argv": sys.argv[1:],
                  "payload": json.loads(os.environ["HEADWAY_RUN"]), "pid": os.getpid()}), flush=True)
"""
# waits for the other ranks if necessary, because importing torch takes seconds, and then runs the test's code.
PROGRAM = (
    REPORT
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
)


def launch(
    folder: Path, body: str, *flags: str, args: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    process = start_launch(folder, body, *flags, args=args, **more)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_launch(
    folder: Path, body: str, *flags: str, args: tuple[str, ...] = (), **more: str
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "OMP_", "GLOO_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "headway", "launch", *flags, "train.py", *args],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, "HEADWAY_HOME": str(folder), **more},
    )  # fmt: skip


def read_reports(result: subprocess.CompletedProcess[str]) -> list[dict]:
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda entry: entry["rank"])


def wait_until_gone(pids: list[int], seconds: float = 10) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(_is_running, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_one_process_runs_python_directly(tmp_path):
    body = "import os, sys; print(sys.argv, os.getpid(), os.environ.get('RANK'), 'headway' in sys.modules)"
    process = start_launch(tmp_path, body, "--cpu", args=("-x", "--"))
    out, err = process.communicate(timeout=60)
    assert out == f"['train.py', '-x', '--'] {process.pid} None False\n"
    assert err == "headway: 1 process on cpu\n"


def test_one_process_returns_its_exit_code(tmp_path):
    assert launch(tmp_path, "raise SystemExit(7)", "--cpu").returncode == 7


def test_two_processes_start(tmp_path):
    result = launch(
        tmp_path, PROGRAM, "--cpu", "-n", "2", "--mixed_precision", "bf16", args=("--x", "a b", "--", "${local_rank}")
    )
    assert result.returncode == 0, result.stderr
    ranks = read_reports(result)
    assert [(entry["rank"], entry["world"]) for entry in ranks] == [(0, "2"), (1, "2")]
    assert ranks[0]["argv"] == ["--x", "a b", "--", "${local_rank}"]
    assert ranks[0]["payload"]["num_processes"] == 2
    assert ranks[0]["payload"]["settings"]["mixed_precision"]["value"] == "bf16"
    # Only the banner is printed, without warnings of torch's agent.
    assert result.stderr.startswith("headway: 2 processes on cpu; precision bf16")
    assert result.stderr.count("\n") == 1


def test_module_and_program_are_launched(tmp_path):
    (tmp_path / "mod.py").write_text(REPORT)
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "2"]
    result = subprocess.run([*command, "-m", "mod", "-x"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [entry["argv"] for entry in read_reports(result)] == [["-x"], ["-x"]], result.stderr
    result = subprocess.run([*command, "--no_python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], result.stderr


def test_first_failure_is_reported_once(tmp_path):
    body = PROGRAM + "def step():\n    raise ValueError('bad luck')\nif rank == 1:\n    step()\ndist.barrier()\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--log_dir", "logs")
    assert result.returncode == 1
    assert "headway: rank 1 of 2 failed first, at train.py:" in result.stderr
    assert " in step (host " in result.stderr
    assert (result.stdout + result.stderr).count("Traceback (most recent call last)") == 1
    failure = json.loads((tmp_path / "logs/failure.json").read_text())
    assert failure["first"]["rank"] == 1
    assert failure["first"]["record"]["kind"] == "ValueError"
    assert "bad luck" in (tmp_path / "logs/rank1.log").read_text()
    assert '"rank": 0' in (tmp_path / "logs/rank0.log").read_text()


@pytest.mark.slow
def test_stderr_contains_only_the_report_and_logs_contain_everything(tmp_path):
    body = (
        "import os, sys\nimport torch\nfrom headway import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 1))\n"
        "for update in range(9):\n"
        "    if update == 4 and accelerator.process_index == 1:\n        accelerator.prepare()\n"
        "    accelerator.backward(model(torch.ones(1, 2)).sum())\n"
    )
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--log_dir", "logs")
    lines = result.stderr.splitlines()
    assert lines[1].startswith("headway: rank 1 of 2 failed first, at train.py:8 (host ")
    assert lines[2:] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 8, in <module>',
        "    accelerator.prepare()",
        "headway.errors.PrepareError: prepare() got nothing; give models, optimizers, loaders, schedules",
        "(2 frames of Headway and torch left out; HEADWAY_LOG_LEVEL=debug shows all)",
        "headway: rank 0 then lost its connection to rank 1 (train.py:9)",
        "headway: logs and failure.json are in logs",
    ], result.stderr
    assert result.stdout == ""
    assert "headway/core/training/prepared/prepare.py" in (tmp_path / "logs/rank1.log").read_text()
    kept = {rank["rank"]: rank["record"] for rank in json.loads((tmp_path / "logs/failure.json").read_text())["ranks"]}
    assert "gloo" in kept[0]["text"]
    assert "gloo" in (tmp_path / "logs/rank0.log").read_text()
    assert "headway/core/training/prepared/prepare.py" in kept[1]["trace"]


@pytest.mark.slow
def test_equal_failures_are_reported_once(tmp_path):
    result = launch(tmp_path, PROGRAM + "raise OSError('no data')\n", "--cpu", "-n", "2")
    assert result.returncode == 1
    assert result.stderr.count("OSError: no data") == 1
    assert "headway: the same on rank" in result.stderr


def test_log_file_contains_both_streams_in_order(tmp_path):
    body = "import sys\nfor n in range(3):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--log_dir", "logs")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "logs/rank0.log").read_text().split("\n") == [
        "out 0",
        "err 0",
        "out 1",
        "err 1",
        "out 2",
        "err 2",
        "",
    ]
    assert "[rank 1] err 2" in result.stdout


def test_killed_rank_is_named(tmp_path):
    body = PROGRAM + "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2")
    assert result.returncode == 137
    assert "rank 1 was ended by SIGKILL; the kernel's counters show no out-of-memory kill" in result.stderr


def test_crash_report_shows_the_python_line(tmp_path):
    body = (
        REPORT
        + "def crash():\n    import ctypes\n    ctypes.string_at(0)\nif rank == 0:\n    crash()\ntime.sleep(300)\n"
    )
    result = launch(tmp_path, body, "--cpu", "-n", "2")
    assert result.returncode == 139
    assert "rank 0 was ended by SIGSEGV" in result.stderr
    assert "in crash" in result.stderr


@pytest.mark.slow
def test_failed_run_is_restarted(tmp_path):
    body = PROGRAM + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == 1:\n    raise OSError('once')\n"
    body += "dist.barrier()\nprint('because', os.environ.get('HEADWAY_RESTART_REASON'))\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--max_restarts", "1", "--log_dir", "logs")
    assert result.returncode == 0, result.stderr
    assert "because rank 1 of 2 failed first" in result.stdout
    assert "restarting all processes (1 of 1 restarts)" in result.stderr
    assert "once" in (tmp_path / "logs/attempt0/rank1.log").read_text()
    assert (tmp_path / "logs/attempt1/rank1.log").exists()


WAIT = PROGRAM + "time.sleep(300)\n"


def _read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    return [json.loads(line)["pid"] for line in lines]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_to_the_launcher_ends_all_processes(tmp_path, name):
    process = start_launch(tmp_path, WAIT, "--cpu", "-n", "2")
    pids = _read_pids(process, 2)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, name)
    # No backend prints anything else.
    assert err.splitlines()[1:] == [f"headway: stopped by {name}; all 2 processes of this machine have ended"], err
    assert wait_until_gone(pids) == []


def test_workers_end_with_a_killed_launcher(tmp_path):
    process = start_launch(tmp_path, REPORT + "time.sleep(300)\n", "--cpu", "-n", "2")
    pids = _read_pids(process, 2)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_gone(pids) == []


@pytest.mark.slow
def test_worker_that_ignores_sigterm_is_killed(tmp_path):
    body = PROGRAM.replace("dist.init", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\ndist.init", 1)
    body += "if rank == 1:\n    raise ValueError('stop')\ntime.sleep(300)\n"
    process = start_launch(tmp_path, body, "--cpu", "-n", "2")
    pids = _read_pids(process, 2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 of 2 failed first" in err
    assert wait_until_gone(pids) == []


def test_dry_run_prints_a_command_that_runs(tmp_path):
    shown = launch(tmp_path, REPORT, "--cpu", "-n", "2", "--dry-run", args=("it's", "$HOME")).stdout
    result = subprocess.run(["sh", "-c", shown], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [entry["argv"] for entry in read_reports(result)] == [["it's", "$HOME"]] * 2, result.stderr


@pytest.mark.slow
def test_conflict_with_the_command_line_is_one_error(tmp_path):
    body = "from headway import Accelerator\nAccelerator(mixed_precision='no', cpu=True)\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--mixed_precision", "bf16")
    assert result.returncode == 1
    assert result.stderr.count("against --mixed_precision bf16 on the command line") == 1
    result = launch(tmp_path, body, "--cpu", "-n", "2", "--mixed_precision", "bf16", "--force")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_workers_with_a_wrong_world_size_are_an_error(tmp_path):
    body = "import os\nos.environ.update(WORLD_SIZE='1', RANK='0')\n"
    body += "from headway import Accelerator\nAccelerator(cpu=True)\n"
    result = launch(tmp_path, body, "--cpu", "-n", "2")
    assert result.returncode == 1
    assert "asked for 2 processes" in result.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.matrix)])
def test_launches_of_two_machines_meet(tmp_path, restarts):
    body = PROGRAM
    if restarts == "1":
        body += "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise OSError('once')\ndist.barrier()\n"
    where = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(_free_port()), "--max_restarts", restarts]
    flags = ["--cpu", "-n", "4", "--num_machines", "2", *where]
    machines = [start_launch(tmp_path, body, *flags, "--machine_rank", rank) for rank in "01"]
    ended = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    shown = [json.loads(line) for out, _ in ended for line in out.splitlines() if line.startswith("{")]
    assert sorted({entry["rank"] for entry in shown}) == [0, 1, 2, 3]
    assert {entry["world"] for entry in shown} == {"4"}
    for rank, (_, err) in enumerate(ended):
        assert f"4 processes on cpu, 2 on each of 2 machines (this is machine {rank})" in err


@pytest.mark.slow
def test_nodes_of_skypilot_meet_without_flags(tmp_path):
    nodes = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}
    # The port is derived from the ID of the task: choose an ID that leads to a free one.
    for number in range(100):
        nodes["SKYPILOT_TASK_ID"] = f"sky-2026-12-01_train_{number}"
        port = detect_cluster({**nodes, "SKYPILOT_NODE_RANK": "0"}).layer["main_process_port"].value
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                break
    machines = [
        start_launch(tmp_path, PROGRAM, "--cpu", "-n", "4", **nodes, SKYPILOT_NODE_RANK=rank) for rank in ("0", "1")
    ]
    ended = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    shown = [json.loads(line) for out, _ in ended for line in out.splitlines() if line.startswith("{")]
    assert sorted({entry["rank"] for entry in shown}) == [0, 1, 2, 3]
    assert "2 on each of 2 machines (this is machine 0)" in ended[0][1]


def _launch_one_machine(folder, port, rank, *flags):
    where = [
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(port),
        "--machine_rank",
        rank,
    ]
    result = launch(folder, PROGRAM, "-q", "--cpu", "-n", "2", *where, *flags)
    assert result.returncode == 1
    assert result.stdout == ""
    assert all(line.startswith("headway: ") for line in result.stderr.splitlines()), result.stderr
    return result.stderr.splitlines()


@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_waiting_machine_is_reported_at_once(tmp_path, rank, restarts):
    port = _free_port()
    limit = "--rdzv_conf" if restarts == "0" else "--timeout"
    first, last = _launch_one_machine(
        tmp_path, port, rank, limit, "timeout=4" if restarts == "0" else "4", "--max_restarts", restarts
    )
    if rank == "0":
        assert first.startswith(f"headway: machine 0 of 2 waits at 127.0.0.1:{port} for machine 1, until ")
        assert last.startswith(
            f"headway: the 2 machines did not meet at 127.0.0.1:{port}: machine 1 did not come within 4 s"
        )
    else:
        assert first.startswith(
            f"headway: machine 1 of 2 waits for machine 0 to open 127.0.0.1:{port} (connection refused so far), until "
        )
        assert last.startswith(f"headway: machine 0 did not open 127.0.0.1:{port} within 4 s")
    assert f"(4 s: {limit}" in first
    assert f"({limit}" in last


@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.matrix)])
def test_taken_port_is_reported_with_its_process(tmp_path, restarts):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (line,) = _launch_one_machine(tmp_path, port, "0", "--max_restarts", restarts)
        assert f"port {port} of this machine is taken by " in line
        assert f"(pid {os.getpid()}: " in line
        assert "such as --main_process_port " in line
        # For the other machine, the process on that port does not answer like machine 0.
        line = _launch_one_machine(tmp_path, port, "1", "--timeout", "3", "--max_restarts", restarts)[-1]
        assert f"what answers at 127.0.0.1:{port} is not the launcher of machine 0" in line


@pytest.mark.slow
def test_slurm_tasks_become_the_processes(tmp_path):
    """As srun does, the same command runs twice. Only the environment differs."""
    common = {
        "SLURM_JOB_ID": str(_free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    tasks = [
        start_launch(tmp_path, PROGRAM, "--cpu", **common, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")
        for rank in "01"
    ]
    ended = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], ended
    assert [json.loads(out)["rank"] for out, _ in ended] == [0, 1]
    assert ended[0][1].startswith("headway: 2 processes on cpu")
    # Only a message about waiting is allowed, on a slow machine.
    assert [
        line for line in ended[1][1].splitlines() if " waits for task 0 " not in line and "are there" not in line
    ] == []


def _create_memory_group() -> Path | None:
    """Create a memory cgroup limited to 600 MiB. Return its folder, or None without permission."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(base, f"headway-test-{os.getpid()}")
        try:
            if Path(base).is_dir():
                folder.mkdir()
                (folder / limit).write_text(str(600 * 2**20))
                return folder
        except OSError:
            if folder.is_dir():
                folder.rmdir()
    return None


def test_kernel_out_of_memory_killer_is_reported(tmp_path):
    group = _create_memory_group()
    if group is None:
        pytest.skip("this machine does not allow creating a memory cgroup")
    try:
        body = "import os, time\nkept = []\n"
        body += "while os.environ['RANK'] == '1':\n    kept.append(bytearray(os.urandom(1)) * 2**24)\n"
        (tmp_path / "train.py").write_text(body + "time.sleep(60)\n")
        enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m headway launch --cpu -n 2 train.py"
        result = subprocess.run(["sh", "-c", enter], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 137, result.stderr
        assert "rank 1 was ended by SIGKILL: the kernel's out-of-memory killer sent it" in result.stderr
        assert "of 600.0 MiB" in result.stderr
    finally:
        time.sleep(0.2)
        group.rmdir()
