"""`headway test` passes on a correct setup, and fails on every rank if one check fails."""

import subprocess
import sys

import pytest

from headway.cli import checks, setup_checks
from headway.core.runtime import process


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "fsdp"])
def test_two_processes_pass_all_checks(strategy: str) -> None:
    words = ["test", "--cpu", "-n", "2", "--strategy", strategy]
    result = subprocess.run([sys.executable, "-m", "headway", *words], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "2 processes, cpu, precision no" in result.stdout
    assert "all checks passed" in result.stdout
    assert "FAILED" not in result.stdout


def test_failed_check_is_named_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_arithmetic(accelerator: object) -> str:
        raise AssertionError("one and one is three")

    monkeypatch.setattr(setup_checks, "_CHECKS", [check_arithmetic])
    process.reset()
    with pytest.raises(SystemExit) as exc_info:
        checks.main(["test"])
    process.reset()
    assert exc_info.value.code == 1
    assert "arithmetic      FAILED rank 0: one and one is three" in capsys.readouterr().out
