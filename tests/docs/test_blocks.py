"""README.md and docs/: every code block runs, every command is valid, and every link target exists."""

import io
import os
import re
import shlex
import subprocess
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from headway.core.runtime import process
from tests.docs.pages import ROOT, list_commands, list_links, list_pages, parse_blocks

PAGES = [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in list_pages()]


def test_pages_are_found():
    assert len(PAGES) > 10
    assert sum(block.kind == "python" for page in list_pages() for block in parse_blocks(page)) > 20


LONG = ("expert_parallel", "context_parallel", "pipeline_parallel", "forecast", "forecast_cases")
"""Pages that launch complete training runs or forecast many models. Only `make test-all` runs them."""
SLOW = ("tensor_parallel", "plan", "notebooks", "adapters", "verify")


def _mark_page(page):
    name = page.values[0].stem
    marks = [pytest.mark.matrix] if name in LONG else [pytest.mark.slow] if name in SLOW else []
    return pytest.param(*page.values, id=page.id, marks=marks)


@pytest.mark.parametrize(
    "page",
    [_mark_page(page) for page in PAGES if any(block.kind == "python" for block in parse_blocks(page.values[0]))],
)
def test_python_blocks_run_in_one_namespace(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    process.reset()
    torch.manual_seed(0)
    _number_event_files_from_0(monkeypatch)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), patch.dict(os.environ):  # variables that a page sets must not affect later tests
            for block in parse_blocks(page):
                if block.kind == "python":
                    if block.file:
                        Path(block.file).write_text(block.text)
                    # Leading newlines make a traceback show the line number in the page.
                    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                    exec(code, module.__dict__)
                elif block.kind == "output":
                    assert block.text.strip() in printed.getvalue(), f"{page.name}:{block.line}"
    finally:
        process.reset()


def _number_event_files_from_0(monkeypatch):
    """Restart TensorBoard's numbering of event files.

    TensorBoard reads files of the same process and second in lexicographic order, so ".10" would come before ".9".
    """
    writer = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if writer is not None:
        monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


@pytest.mark.slow
def test_tutorial_is_one_script_that_runs_on_two_processes(tmp_path):
    page = ROOT / "docs" / "tutorial.md"
    text = "\n\n".join(block.text for block in parse_blocks(page) if block.kind == "python")
    (tmp_path / "train.py").write_text(text)
    ran = _run_headway(["launch", "-n", "2", "--cpu", "train.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "2 process(es)" in ran.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if list_commands(page.values[0])])
def test_commands_are_valid(page, tmp_path):
    for block in parse_blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    for line in list_commands(page):
        words = shlex.split(line, comments=True)
        for word in words:
            if word.endswith(".py") and not (tmp_path / word).exists():
                (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / word).touch()
        if "-m" in words[:-1] and words[:2] == ["headway", "launch"]:
            module = tmp_path.joinpath(*words[words.index("-m") + 1].split(".")).with_suffix(".py")
            module.parent.mkdir(parents=True, exist_ok=True)
            module.touch()
        if words[0] == "headway":
            _check_headway_command(words[1:], line, tmp_path)
        elif words[0] == "make":
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), line
        elif words[0] in ("python", "python3") and words[1].startswith(("scripts/", "benchmarks/", "examples/")):
            assert (ROOT / words[1]).exists(), line


def _check_headway_command(words: list[str], line: str, folder: Path) -> None:
    if words[0] == "launch":
        words = ["launch", "--dry-run", *words[1:]]
    elif words[0] == "verify":
        words = ["verify", "--help", *words[1:]]  # arguments after the script belong to the script
    elif words[:2] not in (["config", "show"], ["config", "default"]):
        end = words.index("--") if "--" in words else len(words)  # arguments after "--" belong to the script
        words = [*words[:end], "--help"]
    ran = _run_headway(words, folder)
    lacks_accelerators = "--gpu_ids" in words and "no accelerator that torch can use" in ran.stderr
    assert ran.returncode == 0 or lacks_accelerators, f"{line}\n{ran.stderr[-1500:]}"


def _run_headway(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "SLURM_"))}
    return subprocess.run([sys.executable, "-m", "headway", *words], cwd=folder, capture_output=True, text=True,
                          timeout=120, env={**environment, "HEADWAY_HOME": str(folder / "home")})  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_link_targets_exist(page):
    assert [target for target in list_links(page) if not (page.parent / target).exists()] == []
