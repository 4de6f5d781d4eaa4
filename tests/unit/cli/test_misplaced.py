"""Test launcher flags after the script: a warning shows the corrected line, and a script's own flags cause no warning."""

import shlex

import pytest

from headway.cli import main
from headway.launch.machine import Machine

MACHINE = Machine("box", "/venv/bin/python", 8, loopback="lo")


@pytest.fixture
def launch(monkeypatch, tmp_path, capsys):
    """Return a function that runs `headway launch` and returns the text on stderr and the plan."""
    plans = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "HEADWAY_RUN", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("headway.launch.machine.inspect_machine", lambda environment: MACHINE)
    monkeypatch.setattr("headway.launch.run.execute_plan", lambda plan, environment, is_quiet: plans.append(plan))

    def run_launch(line):
        plans.clear()
        with pytest.raises(SystemExit) as exc_info:
            main.main(["launch", *shlex.split(line)])
        assert exc_info.value.code == 0
        return capsys.readouterr().err, plans[0]

    return run_launch


@pytest.mark.parametrize(
    ("line", "which", "meant", "silenced"),
    [
        ("train.py -n 2", "-n 2", "-n 2 train.py", "-- train.py -n 2"),
        ("train.py -n 2 --cpu", "-n 2, --cpu", "-n 2 --cpu train.py", "-- train.py -n 2 --cpu"),
        (
            "train.py --lr 1 --mixed-precision bf16 -n 2 --strategy=fsdp --x",
            "--mixed-precision bf16, -n 2, --strategy=fsdp",
            "--mixed-precision bf16 -n 2 --strategy=fsdp train.py --lr 1 --x",
            None,
        ),
        ("train.py -n 2 --mixed_precision fp32 -m", "-n 2", "-n 2 train.py --mixed_precision fp32 -m", None),
        ("--cpu train.py --lr 1 -n2 --x", "-n2", "--cpu -n2 train.py --lr 1 --x", "--cpu -- train.py --lr 1 -n2 --x"),
        ("train.py --num-processes=2 'a b'", "--num-processes=2", "--num-processes=2 train.py 'a b'", None),
        ("train.py --num_processes 2", "--num_processes 2", "--num_processes 2 train.py", None),
        ("-n 2 train.py --multi_gpu --gpu-ids 0,1", "--multi_gpu, --gpu-ids 0,1", None, None),
        ("train.py -n 2 -- -q", "-n 2", "-n 2 train.py -- -q", None),
        ("--no_python echo -n --num_machines 2", "--num_machines 2", None, None),
    ],
)
def test_misplaced_flag_causes_a_warning_with_corrected_lines(launch, line, which, meant, silenced):
    said, plan = launch(line)
    first, launcher, script = said.splitlines()
    assert first.startswith(f"headway: warning: {which} after ")
    assert plan.world_size == (2 if line.startswith("-n 2") else 1)
    # Both suggested lines work as described, and neither causes a warning.
    launcher, script = (text.partition("?")[2].strip() for text in (launcher, script))
    assert meant is None or launcher == f"headway launch {meant}"
    assert silenced is None or script == f"headway launch {silenced}"
    again, silent = launch(script.removeprefix("headway launch "))
    assert again == ""
    assert silent.argv == plan.argv
    if which.startswith(("-n", "--num-p", "--num_p")):
        again, several = launch(launcher.removeprefix("headway launch "))
        assert again == ""
        assert several.world_size == 2


@pytest.mark.parametrize(
    "line",
    [
        "-- train.py -n 2",  # the double dash marks script arguments
        "train.py -- -n 2",
        "-n 4 train.py -n 2",  # the launcher has its own
        "--num-processes 4 train.py -n 2",
        "train.py -n two",  # cannot be the launcher's
        "train.py -n",
        "train.py --mixed_precision fp32 -m0 -nx - a=b --nn 2 -h --help",
        "train.py --mixed_precision bf16 --cpu --gradient_accumulation_steps 4 --debug --dry-run",  # many scripts have these
        "--no_python sh -c true -m -n 2",
    ],
)
def test_script_arguments_cause_no_warning(launch, line):
    said, plan = launch(line)
    assert said == ""
    assert plan.world_size == (4 if "4 train" in line else 1)


def test_misplaced_flag_after_a_module_causes_a_warning(launch, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text("")
    assert "meant for the launcher?  headway launch -m -n 2 pkg.train\n" in launch("-m pkg.train -n 2")[0]


def test_only_one_task_of_a_cluster_prints_the_warning(launch, monkeypatch):
    for name, value in {
        "JOB_ID": "7",
        "STEP_ID": "0",
        "STEP_NUM_NODES": "1",
        "STEP_NUM_TASKS": "2",
        "NODEID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for rank, is_said in (("0", True), ("1", False)):
        monkeypatch.setenv("SLURM_PROCID", rank)
        monkeypatch.setenv("SLURM_LOCALID", rank)
        assert ("warning" in launch("train.py -n 2")[0]) is is_said
