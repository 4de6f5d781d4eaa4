"""A program under the launcher sees the same environment as under Python itself."""

import bz2
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.distributed.test_launch import launch

SHOW = '''"""A docstring."""
import json, pickle, sys
class Own: pass
here = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": globals().get("__file__"), "doc": __doc__,
    "package": __package__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "cached": globals().get("__cached__"), "own": here.Own is Own, "same": here.__dict__ is globals(),
    "back": pickle.loads(pickle.dumps(Own)) is Own, "dir": sorted(set(dir()) - {"__annotations__"}),
}, indent=1))
'''


def run_both_ways(folder: Path, kind: str, target: str, *args: str) -> tuple[subprocess.CompletedProcess[str], ...]:
    how = {"script": [target], "module": ["-m", target]}[kind]
    worker = ["-m", "headway.launch", "worker", str(os.getpid()), kind, "apart", target]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
    return tuple(
        subprocess.run(
            [sys.executable, *start, *args], cwd=folder, capture_output=True, text=True, env=environment, timeout=60
        )
        for start in (how, worker)
    )


def run_and_compare(folder: Path, kind: str, target: str, *args: str) -> subprocess.CompletedProcess[str]:
    plain, ours = run_both_ways(folder, kind, target, *args)
    assert plain.stdout == ours.stdout
    assert plain.returncode == ours.returncode
    return ours


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub/pkg").mkdir(parents=True)
    for name in ("show.py", "sub/show.py", "sub/pkg/__main__.py", "sub/pkg/inner.py"):
        (tmp_path / name).write_text(SHOW)
    (tmp_path / "sub/pkg/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("sub/show.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    return tmp_path


@pytest.mark.parametrize("target", ["show.py", "./sub/show.py", "sub/../show.py", "link.py", "sub/pkg", "app.zip"])
def test_scripts_run_as_under_python(folder, target):
    assert '"same": true' in run_and_compare(folder, "script", target, "-x", "--", "a b", "").stdout


def test_script_with_an_absolute_path_runs_as_under_python(folder):
    run_and_compare(folder, "script", str(folder / "sub" / "show.py"), "1")


@pytest.mark.parametrize("target", ["show", "pkg", "pkg.inner"])
def test_modules_run_as_under_python(folder, target):
    assert '"own": true' in run_and_compare(folder / "sub", "module", target, "-x", "--help").stdout


def test_users_file_does_not_shadow_the_launchers_modules(folder):
    for name in ("json.py", "signal.py", "headway.py"):
        (folder / name).write_text("raise SystemExit('the wrong file')\n")
    (folder / "quiet.py").write_text("print('ran')\n")
    (folder / "sub/quiet.py").write_text("print('ran')\n")
    worker = ["-m", "headway.launch", "worker", str(os.getpid()), "script", "apart", "sub/quiet.py"]
    # With `-m`, Python looks up `headway` in the current folder first. A real installation has no such file there.
    (folder / "headway.py").unlink()
    # An empty entry of PYTHONPATH would add the current folder.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *worker], cwd=folder, capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.stdout == "ran\n", result.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("raise ValueError('x')", 1),
        ("import os; os._exit(5)", 5),
        ("def f(:", 1),
    ],
)
def test_exit_codes_and_stderr_are_the_same(folder, body, code):
    (folder / "end.py").write_text(body + "\n")
    plain, ours = run_both_ways(folder, "script", "end.py")
    assert plain.returncode == ours.returncode == code
    assert plain.stderr == ours.stderr


def test_traceback_is_the_same(folder):
    (folder / "deep.py").write_text("def f():\n    raise KeyError('k')\ntry:\n    f()\nexcept KeyError:\n    1 / 0\n")
    plain, ours = run_both_ways(folder, "script", "deep.py")
    assert "ZeroDivisionError" in plain.stderr
    assert plain.stderr == ours.stderr


def test_users_exception_hook_runs(folder):
    (folder / "hook.py").write_text(
        "import sys\nsys.excepthook = lambda kind, error, trace: print('hook', kind.__name__, trace.tb_lineno)\n1 / 0\n"
    )
    assert run_and_compare(folder, "script", "hook.py").stdout == "hook ZeroDivisionError 3\n"


def test_exit_functions_see_the_program(folder):
    (folder / "late.py").write_text(
        "import atexit, sys\nvalue = 7\n"
        "atexit.register(lambda: print(value, sys.modules['__main__'].value))\n"
    )  # fmt: skip
    assert run_and_compare(folder, "script", "late.py").stdout == "7 7\n"


def test_spawned_children_import_the_program(folder):
    (folder / "spawn.py").write_text(
        "import multiprocessing as mp\ndef work(n):\n    return n * 2\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, [1, 2]))\n"
    )
    assert run_and_compare(folder, "script", "spawn.py").stdout == "[2, 4]\n"


@pytest.mark.parametrize("kind", ["script", "module"])
def test_missing_program_is_an_error(folder, kind):
    plain, ours = run_both_ways(folder, kind, "nothing_here")
    assert plain.returncode != 0
    assert ours.returncode != 0
    assert "nothing_here" in ours.stderr


def test_worker_without_its_launcher_ends(folder):
    worker = ["-m", "headway.launch", "worker", "1", "script", "apart", "show.py"]
    result = subprocess.run([sys.executable, *worker], cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "the launcher died while this process started" in result.stderr


LEAVING = """
import atexit, bz2, sys, threading, time
text = open("text.txt", "w")
text.write("not closed")
packed = bz2.open("packed.bz2", "wt")
packed.write("nor this")
both = open("both.bin", "w+b")
both.write(b"nor that")
atexit.register(print, "atexit")
def later():
    time.sleep(0.5)
    print("a thread that Python waits for")
threading.Thread(target=later).start()
def forever():
    while True:
        time.sleep(0.001)
threading.Thread(target=forever, daemon=True).start()
sys.stdout.write("end")
WAY
"""


@pytest.mark.parametrize(("way", "code"), [
    ("", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit(-1)", 255), ("sys.exit('a word')", 1), ("1 / 0", 1),
    ("sys.exit(True)", 1), ("atexit.register(lambda: 1 / 0)", 0), ("atexit.register(sys.exit, 4)", 0),
])  # fmt: skip
def test_worker_shuts_down_like_python(tmp_path, way, code):
    (tmp_path / "leave.py").write_text(LEAVING.replace("WAY", way))
    ours = run_and_compare(tmp_path, "script", "leave.py")
    assert ours.returncode == code
    assert "a thread that Python waits for" in ours.stdout
    assert "atexit" in ours.stdout
    assert (tmp_path / "text.txt").read_text() == "not closed"
    assert bz2.decompress((tmp_path / "packed.bz2").read_bytes()) == b"nor this"
    assert (tmp_path / "both.bin").read_bytes() == b"nor that"
    assert ("a word" in ours.stderr) == ("a word" in way)
    assert ("ZeroDivisionError" in ours.stderr) == ("1 / 0" in way)


ABORTING = """
import torch, torch.distributed as dist
class Last:
    def __del__(self):
        print("finalized")
last = Last()
dist.init_process_group("gloo")
values = [torch.ones(4) for _ in range(300)]
works = [dist.all_reduce(value, async_op=True) for value in values]
del values
works[-1].wait()
del works
"""


def test_interpreter_is_not_finalized_while_gloo_threads_run(tmp_path):
    # The group is left open. Under plain Python, about one in fifteen such processes aborts: a gloo thread releases
    # the last reference to a tensor after the interpreter is gone.
    result = launch(tmp_path, ABORTING, "--cpu", "-n", "2")
    assert result.returncode == 0, result.stderr
    assert "finalized" not in result.stdout


def test_lines_of_several_ranks_are_not_mixed(tmp_path):
    result = launch(tmp_path, "for number in range(2000): print('line', number, 'is', 'whole')", "--cpu", "-n", "2")
    assert result.returncode == 0, result.stderr
    expected = [f"line {number} is whole" for number in range(2000) for _ in range(2)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
