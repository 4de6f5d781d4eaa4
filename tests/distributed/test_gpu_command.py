"""`python -m benchmarks.gpu`: its output, a failing step, a step that never ends, and a real step at its smallest size."""

import json
import subprocess
import sys
import warnings
import zipfile
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.gpu.__main__ import unpack_wheels
from benchmarks.gpu.cap import limit_memory
from benchmarks.gpu.plan import STEPS, TOTAL, Step, find_missing, select_steps
from benchmarks.gpu.record import Record
from benchmarks.gpu.runner import ROOT, run_all
from benchmarks.gpu.waits import count_waits
from tests.distributed.test_launch import wait_until_gone

STEP = "tests.distributed.gpu_steps"


def run_command(*words, timeout=240):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def test_steps_fit_their_time_and_are_selected_by_name():
    assert sum(step.seconds for step in STEPS) <= TOTAL < 600
    assert [step.name for step in select_steps(["saves", "gpt2"])] == ["gpt2", "saves"]
    assert select_steps([]) == STEPS
    assert find_missing(["json", "no_such_module"]) == ["no_such_module"]


@pytest.mark.slow
def test_failing_or_endless_step_does_not_stop_the_others(tmp_path, capfd):
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("headway_test_carried.py", "VALUE = 3.0\n")
    path = unpack_wheels(tmp_path, str(tmp_path / "unpacked"))
    steps = [Step(name, f"{name}?", 30, f"{STEP}.{name}") for name in ("broken", "endless", "sound")]
    steps[1] = Step("endless", "endless?", 25, f"{STEP}.endless")
    record = Record(tmp_path / "out", "cpu")
    assert not run_all(steps, "cpu", "smallest", record, total=0, path=path)

    found = json.loads(record.json.read_text())["steps"]
    broken, endless, sound = found.values()
    assert broken["state"] == "failed with exit code 1"
    assert [(row["name"], row["value"]) for row in broken["rows"]] == [("before", 1.0), ("a part", None)]
    assert broken["rows"][1]["note"] == "failed: ValueError: no luck"
    assert broken["last_lines"][-1] == "RuntimeError: all is lost"
    assert endless["state"] == "ended at its limit of 25 s"
    assert endless["machine"]["device"] == "cpu"
    assert wait_until_gone([int(endless["rows"][0]["value"])]) == []
    assert (sound["state"], sound["rows"][0]["value"], sound["last_lines"]) == ("done", 3.0, [])
    assert record.summarize(["sound"]).splitlines()[1:] == [
        "  carried: 3 s; reference: 4 s, ratio 0.750; target at least 1: MISSED"
    ]

    table = record.table.read_text()
    assert "**Run on a CPU, at a small size." in table
    assert "| carried | 3 s | reference: 4 s, ratio 0.750 | at least 1: MISSED |  |" in table
    assert "ValueError: no luck" in capfd.readouterr().out  # the step's output is passed on

    again = Record(tmp_path / "out", "cpu")  # a later run of one step keeps the results of the others
    again.begin_step("sound", "sound?", "smallest")
    kept = json.loads(again.json.read_text())["steps"]
    assert kept["broken"] == broken
    assert kept["sound"]["state"] == "started, not finished"


@pytest.mark.slow
def test_terminated_run_keeps_its_results(tmp_path):
    words = ["synchronizations", "--device", "cpu", "--size", "smallest", "--out", str(tmp_path)]
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert any("by hand, bf16: " in line for line in run.stdout)  # the first row
    children = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
    run.terminate()
    assert run.wait(30) == 143
    assert children
    assert wait_until_gone(children) == []
    found = json.loads((tmp_path / "cpu.json").read_text())["steps"]["synchronizations"]
    assert found["state"] == "started, not finished"
    assert found["rows"][0]["name"] == "by hand, bf16"
    assert "| by hand, bf16 |" in (tmp_path / "cpu.md").read_text()


def test_step_with_missing_packages_is_skipped(tmp_path):
    record = Record(tmp_path, "cpu")
    step = Step("sound", "sound?", 30, f"{STEP}.sound", needs=("json", "no_such_module"))
    assert not run_all([step], "cpu", "smallest", record, total=0)
    assert record.steps["sound"]["state"] == "left out: no_such_module not installed"


def test_missing_packages_are_reported_in_one_line(tmp_path):
    """Runs without the environment's packages: first with a broken torch, then with only an empty torch."""

    def run_without_packages(torch, *words):
        (tmp_path / "torch.py").write_text(torch)
        result = subprocess.run(
            [sys.executable, "-S", "-m", "benchmarks.gpu", *words],
            cwd=ROOT,
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2
        return (result.stdout + result.stderr).splitlines()[-1]

    assert run_without_packages("raise ImportError('no driver')").endswith(
        "error: torch does not work here: ImportError: no driver"
    )
    lacks = run_without_packages("", "--device", "cpu")
    assert lacks.startswith("not installed: numpy, safetensors, xxhash, click, ")
    assert "nothing runs without numpy, " in lacks


# ---------------------------------------------------------------- code for GPUs, with recorded calls


def test_waits_on_cuda_are_counted_from_torch_warnings(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)  # there is no CUDA here

    def run():
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    found = count_waits(SimpleNamespace(device=torch.device("cuda")), lambda: (run(), run()))
    assert modes == ["warn", "default"]
    assert found.total() == 2
    assert [place.rpartition(":")[0] for place in found] == ["distributed/test_gpu_command.py"]


def test_allocator_limit_is_set_and_removed():
    limits = []
    module = SimpleNamespace(
        set_per_process_memory_fraction=lambda share, device: limits.append((share, device)),
        memory_reserved=lambda device: 10 << 30,
        mem_get_info=lambda device: (60 << 30, 80 << 30),
    )  # no device with an allocator is here
    bench = SimpleNamespace(is_cpu=False, device=torch.device("cuda:0"), module=module, release=lambda: None)
    with pytest.raises(KeyError), limit_memory(bench, 10 << 30):
        raise KeyError
    assert limits == [(0.25, bench.device), (1.0, bench.device)]
    del module.set_per_process_memory_fraction
    with pytest.raises(NotImplementedError, match="torch cannot limit the memory of cuda"), limit_memory(bench, 1):
        pass


@pytest.mark.slow
def test_command_runs_a_real_step_and_records_its_rows(tmp_path):
    result = run_command("out_of_memory", "--device", "cpu", "--size", "smallest", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    (step,) = json.loads((tmp_path / "cpu.json").read_text())["steps"].values()
    assert (step["state"], step["size"]) == ("done", "smallest")
    assert step["machine"]["headway"]
    assert {row["name"]: row["is_met"] for row in step["rows"]} == {
        "foreach: updates in two halves": True,
        "fused: updates in two halves": True,
        "capturable": None,
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gtp2"], "no such step: gtp2; choose from synchronizations, gpt2"),
        (["--device", "cpu", "--size", "full"], "--size full is meant for an accelerator"),
        (["--wheels", "nowhere"], "--wheels nowhere contains no .whl file"),
    ],
)
def test_wrong_arguments_are_explained(words, expected):
    result = run_command(*words)
    assert result.returncode == 2
    assert expected in result.stderr


def test_list_prints_all_steps():
    result = run_command("--list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [step.name for step in STEPS]
