"""Test where CUDA was first used. Without a GPU, torch's queue of calls is run by hand; tests/gpu tests the real one."""

import linecache
import subprocess
import sys

import pytest

from headway.common import scope
from headway.core.runtime.first_use import FirstUse, note_first_use
from headway.launch import notebook

CELL = "import torch\n\nmodel = start()\n"


@pytest.fixture
def first_use():
    """Singleton that records the first use, created anew for the test."""
    scope.drop(FirstUse)
    yield scope.get_or_create(FirstUse)
    scope.drop(FirstUse)


def test_cell_of_a_notebook_is_named(first_use):
    path = "/tmp/ipykernel_1/123.py"
    linecache.cache[path] = (len(CELL), None, CELL.splitlines(keepends=True), path)
    exec(compile(CELL, path, "exec"), {"start": note_first_use, "In": ["", "1 + 1", CELL]})
    assert first_use.place == "line 3 of the cell In [2]: model = start()"
    del linecache.cache[path]


def test_line_of_a_script_is_named(first_use):
    note_first_use()
    assert first_use.place.startswith(f"{__file__}:")
    assert first_use.place.endswith("note_first_use()")


@pytest.mark.slow
def test_torch_calls_the_function_at_its_first_use():
    # Check torch's own queue, which torch runs when it initializes CUDA.
    code = (
        "import torch, headway.core.runtime.device\nimport headway.core.runtime.first_use as d\nfrom headway.common import scope\n"
        "assert scope.get_or_create(d.FirstUse).place is None\n"
        "queued = [call for call, _ in torch.cuda._queued_calls]\nassert d.note_first_use in queued\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_launch_reports_the_used_memory(monkeypatch, capsys, first_use):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 << 30)
    first_use.place = "line 3 of the cell In [2]: model.cuda()"
    notebook._report_used_memory()
    output = capsys.readouterr().err
    assert "since line 3 of the cell In [2]: model.cuda()" in output
    assert "3.0 GiB less" in output
