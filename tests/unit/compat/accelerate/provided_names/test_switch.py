"""Test Headway under Accelerate's name: in a process and its subprocesses, with and without the real package."""

import os
import subprocess
import sys
from importlib.metadata import distributions, metadata, version
from pathlib import Path

import pytest

from headway.compat import install_as_accelerate
from headway.errors import ConfigError
from headway.launch.stand_in import FOLDER, VERSION, make_variables

INSTALL = "from headway.compat import install_as_accelerate; install_as_accelerate()\n"


def run_code(code: str, folder: Path, *flags: str, **more: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )


def run_and_split_output(code: str, folder: Path, *flags: str, **more: str) -> list[str]:
    """Run code that must succeed and return the words that it prints."""
    ended = run_code(code, folder, *flags, **more)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


WHO = "import accelerate; print(accelerate.__headway_version__, accelerate.__version__)"


def test_version_equals_that_of_the_provided_names():
    assert version("accelerate") == VERSION


@pytest.mark.parametrize("name", ["Name", "Version", "Home-page"])
def test_distribution_has_the_fields_of_the_real_one(name):
    """sentence-transformers trains only if the home page of the installed Accelerate is the right one."""
    (ours,) = distributions(name="accelerate", path=[str(FOLDER)])
    assert ours.metadata[name] == metadata("accelerate")[name] is not None


@pytest.mark.slow
def test_every_import_in_a_process_gives_headway(tmp_path):
    """Check everything in one process, because each process imports torch: names, errors, assignments and a tracker."""
    code = (
        INSTALL
        + """
import accelerate, accelerate.utils.operations, headway
from accelerate import Accelerator
from accelerate.utils import set_seed, DistributedType
from accelerate.utils.modeling import clean_device_map
from accelerate.utils.operations import gather
from accelerate.state import PartialState
assert issubclass(Accelerator, headway.Accelerator)
assert gather is headway.gather and set_seed is headway.set_seed and PartialState is headway.PartialState
assert accelerate.utils.operations.gather is gather
print(accelerate.__version__)

def said(statement, kind):
    try:
        exec(statement)
    except kind as error:
        return str(error)
    raise AssertionError(f"{statement} is no {kind.__name__}")

for statement in ("from accelerate.utils import AimCheckpoint", "import accelerate.no_such", "from accelerate import nothing"):
    said(statement, ImportError)
text = said("accelerate.utils.xyz", AttributeError)
assert text == "module 'accelerate', served by Headway, has no attribute 'xyz'", text

import accelerate.big_modeling as b
old, b.find_tied_parameters = b.find_tied_parameters, 1
assert b.find_tied_parameters == 1 and headway.find_tied_parameters is old

assert not accelerate.Accelerator(cpu=True).get_tracker("wandb").log({"a": 1})  # none is there: one that does nothing
"""
    )
    assert run_and_split_output(code, tmp_path)[0] == VERSION


def test_subprocesses_import_headway(tmp_path):
    code = INSTALL + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO!r}], check=True)"
    assert run_and_split_output(code, tmp_path)[1] == VERSION


def test_spawned_workers_import_headway(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "def ask(_):\n    import accelerate\n    return accelerate.__headway_version__\n"
        "if __name__ == '__main__':\n"
        f"    {INSTALL.strip()}\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(*pool.map(ask, [0]))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_environment_variables_alone_are_enough(tmp_path):
    assert run_and_split_output(WHO, tmp_path, **make_variables({}))[1] == VERSION


def test_version_check_passes_without_the_real_package(tmp_path):
    code = """
import sys
sys.path[:] = [each for each in sys.path if "site-packages" not in each]
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
print(version("accelerate"), find_spec("accelerate").origin, *packages_distributions()["accelerate"])
"""
    assert run_and_split_output(code, tmp_path, **make_variables({})) == [
        VERSION,
        str(FOLDER / "accelerate" / "__init__.py"),
        "accelerate",
    ]


@pytest.mark.slow
def test_transformers_accepts_the_version(tmp_path):
    code = INSTALL + "from transformers.utils import is_accelerate_available as a; print(a('1.15.0'), a('1.16.0'))"
    assert run_and_split_output(code, tmp_path) == ["True", "False"]


@pytest.mark.slow
def test_installing_after_the_import_is_an_error_with_advice(tmp_path):
    ended = run_code("import accelerate\n" + INSTALL, tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "too late" in last
    assert "headway launch --as accelerate" in last


def test_installing_twice_has_no_further_effect(tmp_path):
    code = (
        INSTALL * 2
        + "import accelerate, os, sys\n"
        + INSTALL
        + "print(sys.path.count(sys.path[0]), os.environ['PYTHONPATH'])"
    )
    assert run_and_split_output(code, tmp_path) == ["1", str(FOLDER)]


def test_existing_pythonpath_is_kept(tmp_path):
    assert make_variables({"PYTHONPATH": f"/a{os.pathsep}{FOLDER}{os.pathsep}/b"})["PYTHONPATH"] == os.pathsep.join(
        [str(FOLDER), "/a", "/b"]
    )


def test_folder_that_pythonpath_cannot_contain_is_refused_before_any_change(monkeypatch):
    folder = Path(f"/a{os.pathsep}b")
    monkeypatch.setattr("headway.launch.stand_in.FOLDER", folder)
    monkeypatch.setattr("headway.compat.accelerate.provided_names.finder.FOLDER", folder)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    before = list(sys.path)
    with pytest.raises(ConfigError, match="install it elsewhere") as exc_info:
        install_as_accelerate()
    assert "install_as_accelerate" not in str(exc_info.value)  # the call that failed is no advice
    assert sys.path == before


def test_launcher_starts_scripts_as_accelerate(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WHO)
    command = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", "1", "--as", "accelerate", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.split()[1:] == [VERSION], result.stderr


def test_module_path_of_accelerates_launcher_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WHO)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | make_variables({}))
    assert result.stdout.split()[1:] == [VERSION], result.stderr
