"""Test that `headway verify` refuses what it cannot check with exit code 2, before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main, verify


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that receives the options of each verification instead of starting it."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(verify, "_start_main_process", found.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import headway\n")
    (tmp_path / "open.py").write_text("import torch\nfor x in range(3)\n    print(x)\n")
    (tmp_path / "null.py").write_bytes(b"import torch\0\n")
    return found


def run_verify(*args: str) -> int:
    with pytest.raises(SystemExit) as exc_info:
        main.main(["verify", *args])
    assert isinstance(exc_info.value.code, int)
    return exc_info.value.code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "repeat", "--skip", "repeat", "train.py"), "--only repeat --skip repeat leaves no proof to run"),
        (("--skip", ",".join(verify.PROOFS), "train.py"), "leaves no proof to run"),
        (("--only", "layout", "train.py"), "'layout' needs a layout to compare with: add one, such as --strategy fsdp"),
        (("open.py",), "syntax error at open.py:2: expected ':'\n    for x in range(3)"),
        (("null.py",), "null bytes"),
        (("--max_restarts", "2", "train.py"), "leave --max_restarts out"),
        (("--log_dir", "logs", "train.py"), "leave --log_dir out"),
        (("--resume_args", "it's", "train.py"), "No closing quotation; close the quotation"),
        (("missing.py",), "give its path, or -m to run a module\n"),
    ],
)
def test_refusal_happens_before_any_run(
    started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    assert run_verify(*args) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
    assert run_verify("--json", *args) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    result = json.loads(printed.out)
    assert message.strip() in result["error"]
    assert result == {
        "error": result["error"], "seconds": None, "updates": None, "notes": [], "escaped": [], "proofs": [],
    }  # fmt: skip
    assert not started


@pytest.mark.parametrize("args", [(), ("--only", "layout,repeat"), ("--only", "layout", "--strategy", "fsdp")])
def test_valid_command_line_starts_the_verification(started: list[dict[str, Any]], args: tuple[str, ...]) -> None:
    assert run_verify("--cpu", *args, "train.py") == 0
    assert len(started) == 1


def test_help_lists_only_options_of_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one per visible accelerator, at least 2" in text
    assert "--as" in text
    for flag in ("--max_restarts", "--log_dir", "--num_machines"):
        assert flag not in text
