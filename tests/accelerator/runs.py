"""Runs a script in a process of its own, where torch knows the toy accelerator: a process can register one only once."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.accelerator.toy import build

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    build.missing() is not None, reason=f"{build.missing()}: the toy accelerator is not built"
)


def variables(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose processes have the toy installed as a vendor's package is: torch imports it by its entry point."""
    package = folder / "installed/toy-1.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntoy = tests.accelerator.toy:register\n")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(package.parent)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "TOY_"))}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(folder: Path, *command: str, code: int = 0, timeout: float = 120, **more: str) -> str:
    """What a command printed on both streams; its end is checked.

    Args:
        folder: where it runs.
        command: what follows the interpreter's name.
        code: how it has to end.
        more: further variables of its environment.
    """
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables(folder, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def run_script(folder: Path, text: str, code: int = 0, **more: str) -> str:
    """What a script printed, given as its text."""
    (folder / "script.py").write_text(textwrap.dedent(text))
    return run(folder, "script.py", code=code, **more)
