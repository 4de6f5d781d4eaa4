"""`headway test` passes on a correct setup, and fails on every rank if one check fails."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from headway import Accelerator
from headway.cli import checks, setup_checks
from headway.common.optional import is_available
from headway.core.runtime import process


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["-n", "2", "--strategy", "ddp"], marks=pytest.mark.matrix),
        ["-n", "2", "--strategy", "fsdp", "--activation_checkpointing"],
        ["-n", "3", "--strategy", "tp"],
        ["-n", "2", "--strategy", "cp"],
        ["-n", "3", "--strategy", "pp"],
        ["-n", "2", "--strategy", "ep", "--mixed_precision", "bf16"],
        ["-n", "4", "--strategy", "ep=2+tp=2"],
        ["-n", "4", "--strategy", "pp=2+ep=2"],
        ["-n", "2", "--strategy", "ddp", "--mixed_precision", "fp16"],
        pytest.param(
            ["-n", "2", "--strategy", "zero3"],
            marks=pytest.mark.skipif(not is_available("deepspeed"), reason="deepspeed is not installed"),
        ),
    ],
    ids=" ".join,
)
def test_processes_pass_all_checks_in_every_layout(words: list[str]) -> None:
    command = [sys.executable, "-m", "headway", "test", "--cpu", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert f"{words[1]} processes, cpu, precision" in result.stdout
    assert "all checks passed" in result.stdout
    assert "FAILED" not in result.stdout
    assert "RNG states" not in result.stderr  # the checks seed all ranks alike


def test_wrong_gradients_are_found_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_backward = Accelerator.backward

    def scale_and_backward(accelerator: Accelerator, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain_backward(accelerator, loss * 1.01, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "backward", scale_and_backward)
    monkeypatch.setattr(setup_checks, "_CHECKS", [setup_checks.check_gradient])
    process.reset()
    with pytest.raises(SystemExit) as exc_info:
        checks.main(["test"])
    process.reset()
    assert exc_info.value.code == 1
    assert "gradient        FAILED rank 0: the gradient of first.weight is off by" in capsys.readouterr().out


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
