"""mypy and Pyright (as basedpyright, which includes node) infer the types that facade_types.py asserts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKED = Path(__file__).with_name("facade_types.py")
CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["basedpyright", "--level", "error"]}


def _run_checker(checker, file):
    command = [sys.executable, "-m", *CHECKERS[checker], str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checker_infers_the_types_of_the_public_api(checker):
    ran = _run_checker(checker, CHECKED)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checker_finds_a_wrong_type(checker, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(CHECKED.read_text().replace("assert_type(model, Net)", "assert_type(model, int)"))
    ran = _run_checker(checker, wrong)
    assert ran.returncode != 0
    assert "Net" in ran.stdout
