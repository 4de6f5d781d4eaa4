"""`headway verify` refuses at once what it cannot check: before any process starts, with exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main, verify


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of the verifications that would start. The process of the tests cannot be replaced, as a start does."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(verify, "_start", found.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import headway\n")
    (tmp_path / "open.py").write_text("import torch\nfor x in range(3)\n    print(x)\n")
    (tmp_path / "null.py").write_bytes(b"import torch\0\n")
    return found


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["verify", *args])
    assert isinstance(ended.value.code, int)
    return ended.value.code


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
        (("missing.py",), "give its path, or -m to run a module\n"),
    ],
)
def test_a_refusal_needs_no_run(
    started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    assert run(*args) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
    assert run("--json", *args) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    result = json.loads(printed.out)
    assert message.strip() in result["error"]
    assert result == {
        "error": result["error"], "seconds": None, "updates": None, "notes": [], "escaped": [], "proofs": [],
    }  # fmt: skip
    assert not started


@pytest.mark.parametrize("args", [(), ("--only", "layout,repeat"), ("--only", "layout", "--strategy", "fsdp")])
def test_other_command_lines_start(started: list[dict[str, Any]], args: tuple[str, ...]) -> None:
    assert run("--cpu", *args, "train.py") == 0
    assert len(started) == 1


def test_the_help_is_about_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one per visible accelerator, at least 2" in text
    assert "--as" in text
    for flag in ("--max_restarts", "--log_dir", "--num_machines"):
        assert flag not in text
