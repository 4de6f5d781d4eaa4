"""Helpers that run a script on the toy accelerator in its own process, because a process can register a backend only once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.accelerator.toy import build

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    build.find_missing_tool() is not None, reason=f"{build.find_missing_tool()}: the toy accelerator is not built"
)


def make_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment in which torch finds the toy accelerator through an entry point, like an installed vendor package."""
    package = folder / "installed/toy-1.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntoy = tests.accelerator.toy:register\n")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(package.parent)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TOY_"))}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(folder: Path, *command: str, code: int = 0, timeout: float = 120, **more: str) -> str:
    """Run a Python command and return its stdout and stderr. Fail if the exit code is not `code`.

    Args:
        folder: Working directory.
        command: Arguments of the Python interpreter.
        code: Expected exit code.
        timeout: Time limit in seconds.
        more: Additional environment variables.
    """
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=make_environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    return output


def run_script(folder: Path, text: str, code: int = 0, **more: str) -> str:
    """Write `text` to a file, run it in `folder`, and return its output."""
    (folder / "script.py").write_text(textwrap.dedent(text))
    return run(folder, "script.py", code=code, **more)
