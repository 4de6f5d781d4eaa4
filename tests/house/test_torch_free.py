"""The command line imports neither torch nor numpy, and `import headway` and the Accelerator import only what they need."""

import ast
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich", "questionary", "psutil")

COMMANDS = [
    ["--help"],
    ["--version"],
    ["launch", "--help"],
    ["launch", "--dry-run", "-n", "2", "-m", "json.tool"],
    ["config", "--help"],
    ["config", "show"],
    ["env", "--help"],
    ["estimate", "--help"],
    ["report", "--help"],
    ["tokenize", "--help"],
    ["compat", "--help"],
    ["compat"],
    ["compat", "--path"],
]


def list_imports(arguments: list[str], home: str, code: int = 0, says: str = "") -> set[str]:
    """Run `python -m headway ARGUMENTS` and return the names of the modules that it imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headway", *arguments],
        capture_output=True, text=True, timeout=60, env={"PATH": "", "HEADWAY_HOME": home, **_python_path()},
    )  # fmt: skip
    assert result.returncode == code, result.stderr[-2000:]
    assert says in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_heavy_import(arguments, tmp_path):
    modules = list_imports(arguments, str(tmp_path))
    assert "headway.cli.main" in modules
    assert sorted({name.partition(".")[0] for name in modules} & set(HEAVY)) == []


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"]], ids=" ".join)
def test_help_does_not_wait_for_openssl(arguments, tmp_path):
    assert not list_imports(arguments, str(tmp_path)) & {"hmac", "_hashlib"}


def test_unknown_device_is_reported_before_torch_is_imported(tmp_path):
    says = "device='a100' is not in the table; did you mean a100-40gb or a100-80gb?"
    modules = list_imports(["estimate", "gpt2", "--device", "a100"], str(tmp_path), code=2, says=says)
    assert sorted({name.partition(".")[0] for name in modules} & {"torch", "numpy", "transformers"}) == []


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"]], ids=" ".join)
def test_environment_report_does_not_import_torch(arguments, tmp_path):
    modules = {name.partition(".")[0] for name in list_imports(arguments, str(tmp_path))}
    assert not modules & {"torch", "numpy"}


def test_report_does_not_import_heavy_packages(tmp_path):
    start = '{"kind":"run","time":1.0,"format":1,"project":"p","config":{},"world_size":1,"device":"cpu","versions":{},"attempt":1}'
    values = '{"kind":"values","time":2.0,"step":1,"values":{"loss":1.5}}'
    (tmp_path / "log.jsonl").write_text(f"{start}\n{values}\n")
    modules = {name.partition(".")[0] for name in list_imports(["report", str(tmp_path)], str(tmp_path))}
    assert (tmp_path / "report.html").exists()
    assert not modules & {*HEAVY, "matplotlib"}


def test_one_process_launch_does_not_import_heavy_packages(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')\n")
    modules = list_imports(["launch", "--cpu", str(tmp_path / "train.py")], str(tmp_path))
    assert not {name.partition(".")[0] for name in modules} & set(HEAVY)


def test_importing_headway_does_not_import_torch(tmp_path):
    code = "import headway, sys; print(sorted(set(sys.modules) & {'torch', 'numpy', 'click', 'rich'}))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_python_path(), timeout=60
    )
    assert result.stdout == "[]\n", result.stderr


ALLOWED_PACKAGES = {"xxhash"}
"""Packages that the Accelerator imports in addition to torch, torch's dependencies and the standard library. Do not extend."""

IMPORTED_ON_USE = ("core.checkpoint.resume.preemption", "core.memory.monitor", "core.memory.batch_size", "core.tracking.run_logger",
          "core.tracking.runlog", "core.tracking.progress", "core.tracking.report",
          "core.training.checks.finite", "core.training.forecast_types", "cli", "extras", "forecasting",
          "launch.agent", "launch.watch", "layouts.context", "layouts.pipeline", "layouts.tensor", "offload",
          "planning", "trainer")  # fmt: skip
"""Parts of Headway that one process with default options does not need."""


def list_additional_imports(statement: str) -> set[str]:
    """Return the modules that `statement` imports in a process that has already imported torch."""
    code = f"import sys, torch; before = set(sys.modules); {statement}; print(sorted(set(sys.modules) - before))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_python_path(), timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(ast.literal_eval(result.stdout))


def test_imports_of_the_accelerator():
    found = list_additional_imports("from headway import Accelerator; Accelerator(cpu=True)")
    assert "headway.accelerator" in found
    top = {name.partition(".")[0] for name in found} - {"headway", *sys.stdlib_module_names}
    assert {name for name in top if not name.startswith("_")} == ALLOWED_PACKAGES
    # Importing torch's compiler or the packages of trackers, models and datasets takes longer than importing torch.
    assert {name for name in found if name.startswith(("torch.", "numpy."))} == set()
    late = tuple(f"headway.{part}" for part in IMPORTED_ON_USE)
    assert sorted(name for name in found if name.startswith(late)) == []
