"""`srun headway launch` under a real SLURM installation with two nodes on this host, and `mpirun headway launch` under Open MPI."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).with_name("slurm_up.sh")
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NODEID", "OMP_NUM_THREADS")
told = {**{name: os.environ.get(name) for name in names}, "total": total.item()}
os.write(1, (json.dumps(told) + "\\n").encode())
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("the second shard is missing")
dist.barrier()
dist.destroy_process_group()
"""


def make_environment(**more: str) -> dict[str, str]:
    ours = ("HEADWAY_", "OMP_", "GLOO_", "SLURM_", "OMPI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": PATH, "GLOO_SOCKET_IFNAME": "lo", **more}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start SLURM's daemons for the tests of this file, and yield the environment variables that select this cluster."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"SLURM's {', '.join(missing)} is not installed (Debian: slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    begun = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, timeout=120)
    if begun.returncode:
        pytest.skip(f"SLURM's daemons do not run here: {(begun.stdout + begun.stderr)[-500:]}")
    try:
        yield make_environment(SLURM_CONF=str(folder / "slurm.conf"))
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=60)


def run(command: str, folder: Path, variables: dict[str, str]) -> tuple[int, list[dict], str]:
    (folder / "train.py").write_text(PROGRAM)
    result = subprocess.run(command.split(), cwd=folder, env={**variables, "HEADWAY_HOME": str(folder)},
                         capture_output=True, text=True, timeout=80)  # fmt: skip
    told = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return result.returncode, sorted(told, key=lambda entry: int(entry["RANK"])), result.stderr


def test_one_task_per_node_starts_the_local_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    command = "srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 2 headway launch -n 4 --cpu train.py"
    code, told, stderr = run(command, tmp_path, slurm)
    assert code == 0, stderr
    places = [(entry["RANK"], entry["LOCAL_RANK"], entry["SLURM_NODEID"], entry["total"]) for entry in told]
    assert places == [("0", "0", "0", 6.0), ("1", "1", "0", 6.0), ("2", "0", "1", 6.0), ("3", "1", "1", 6.0)]
    assert "4 processes on cpu, 2 on each of 2 machines (this is machine 1)" in stderr


def test_each_task_becomes_one_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    command = "srun --nodes 2 --ntasks-per-node 2 --cpus-per-task 2 headway launch --cpu train.py"
    code, told, stderr = run(command, tmp_path, slurm)
    assert code == 0, stderr
    places = [(entry["RANK"], entry["LOCAL_RANK"], entry["LOCAL_WORLD_SIZE"], entry["SLURM_NODEID"]) for entry in told]
    assert places == [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "0", "2", "1"), ("3", "1", "2", "1")]
    assert {entry["OMP_NUM_THREADS"] for entry in told} == {"2"}
    assert stderr.count("headway: 4 processes on cpu, 2 on each of 2 machines") == 1


def test_tasks_without_the_launcher_are_warned_of(slurm: dict[str, str], tmp_path: Path) -> None:
    program = "from headway import Accelerator; print(Accelerator(cpu=True).num_processes)"
    (tmp_path / "alone.py").write_text(program)
    command = f"srun --nodes 2 --ntasks-per-node 2 --cpus-per-task 2 {sys.executable} alone.py"
    done = subprocess.run(command.split(), cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=80)
    assert done.stdout.split() == ["1"] * 4, done.stderr
    assert done.stderr.count("srun has started 4 tasks of this script") == 1


def assert_reported_once(stderr: str) -> None:
    assert stderr.count("headway: rank 1 of 2 failed first, at train.py:") == 1, stderr
    assert stderr.count("ValueError: the second shard is missing") == 1, stderr
    assert stderr.count("; its report is with rank 0's output\n") == 1, stderr


def test_failed_task_is_reported_and_ends_the_others(slurm: dict[str, str], tmp_path: Path) -> None:
    code, _, stderr = run("srun --nodes 1 --ntasks 2 headway launch --cpu train.py fail", tmp_path, slurm)
    assert code == 1
    assert_reported_once(stderr)


TRAINING = """
import json, os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed
set_seed(0)
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
model = torch.nn.Linear(4, 1)
x = torch.randn(80, 4)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))
is_resumed = accelerator.resume("latest") is not None
for _ in accelerator.epochs(1):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        told = {"rank": accelerator.process_index, "update": accelerator.num_updates, "resumed": is_resumed}
        os.write(1, (json.dumps({**told, "end": os.environ.get("SLURM_JOB_END_TIME")}) + "\\n").encode())
        while not is_resumed and accelerator.num_updates >= 5 and not accelerator.preempted:
            accelerator.check_preemption()
            time.sleep(0.05)
"""


def read_recipe() -> str:
    """Return the job script of docs/slurm.md, adapted to two small nodes without GPUs."""
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    text = page.split("<!-- file: train.sbatch -->")[1].split("```text\n")[1].split("```")[0]
    kept = [line for line in text.splitlines() if "--gpus" not in line and "--cpus" not in line]
    kept.insert(1, "#SBATCH --output=job.txt")
    return "\n".join(kept).replace("headway launch", "headway launch -n 2 --cpu")


def test_preempted_recipe_is_requeued_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "train.sbatch").write_text(read_recipe())
    variables = {**slurm, "HEADWAY_HOME": str(tmp_path)}

    def run_slurm(*words: str) -> str:
        return subprocess.run(
            words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    job = run_slurm("sbatch", "--parsable", "train.sbatch").strip()
    output = tmp_path / "job.txt"

    def entries() -> list[dict]:
        text = output.read_text() if output.exists() else ""
        return [json.loads(line[line.index("{") :]) for line in text.splitlines() if line.endswith("}")]

    def wait_for(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not is_so():
            assert time.monotonic() < deadline, output.read_text() if output.exists() else run_slurm("squeue")
            time.sleep(0.2)

    try:
        wait_for(lambda: sum(entry["update"] == 5 for entry in entries()) == 2)
        run_slurm("scancel", "--signal=TERM", job)
        wait_for(lambda: sum(entry["update"] == 20 for entry in entries()) == 2)
        wait_for(lambda: "COMPLETED" in run_slurm("scontrol", "show", "job", job))
    finally:
        subprocess.run(["scancel", job], env=variables, capture_output=True, timeout=60)
        deadline = time.monotonic() + 30
        while job in run_slurm("squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
            time.sleep(0.2)  # otherwise its steps would outlive SLURM's daemons
    assert "Restarts=1" in run_slurm("scontrol", "show", "job", job)
    said = output.read_text()
    assert "headway: preempted by SIGTERM on rank " in said
    assert all(int(entry["end"]) > time.time() for entry in entries())
    for rank in range(2):
        updates = [entry["update"] for entry in entries() if entry["rank"] == rank]
        assert updates == list(range(1, 21))
        assert {entry["update"] for entry in entries() if entry["resumed"]} == set(range(6, 21))


def test_open_mpi_with_a_hostfile_starts_all_ranks(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun.openmpi")  # Debian's name; `mpirun` may be MPICH's
    if mpirun is None:
        pytest.skip("Open MPI's mpirun is not installed (Debian: openmpi-bin)")
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    command = f"{mpirun} --allow-run-as-root --hostfile hostfile -np 2 headway launch --cpu train.py"
    code, told, stderr = run(command, tmp_path, make_environment())
    assert code == 0, stderr
    places = [(entry["RANK"], entry["LOCAL_RANK"], entry["total"]) for entry in told]
    assert places == [("0", "0", 1.0), ("1", "1", 1.0)]
    code, _, stderr = run(f"{command} fail", tmp_path, make_environment())
    assert code == 1
    assert_reported_once(stderr)
