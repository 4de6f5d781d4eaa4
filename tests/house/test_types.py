"""mypy and Pyright (basedpyright, which brings its own node) resolve the facade's types as facade_types.py says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKED = Path(__file__).with_name("facade_types.py")
CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["basedpyright", "--level", "error"]}


def _check(checker, file):
    command = [sys.executable, "-m", *CHECKERS[checker], str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_an_editor_knows_the_types_of_the_facade(checker):
    ran = _check(checker, CHECKED)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_wrong_type_is_found(checker, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(CHECKED.read_text().replace("assert_type(model, Net)", "assert_type(model, int)"))
    ran = _check(checker, wrong)
    assert ran.returncode != 0
    assert "Net" in ran.stdout
