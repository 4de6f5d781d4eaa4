"""Test torch.compile's caches in checkpoints: a resumed run compiles nothing, and loads only artifacts its user has sealed."""

import json
import os
import shutil
import stat
import subprocess
import sys

import pytest

from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.extras import compiled_artifacts as compiled

PROGRAM = """
import json
import torch
from torch._dynamo.utils import counters
from headway import Accelerator, ProjectConfiguration

project = ProjectConfiguration("run", automatic_checkpoint_naming=True, keep_compiled=True)
accelerator = Accelerator(cpu=True, project_config=project, dynamo_backend="inductor")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.resume("latest")
with accelerator.accumulate(model):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
accelerator.save_state()
found = counters["aot_autograd"]
print(json.dumps({"hits": found["autograd_cache_hit"], "misses": found["autograd_cache_miss"]}))
"""


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_resumed_run_finds_compiled_artifacts(tmp_path):
    def run_program(cache: str, home: str) -> tuple[dict, str]:
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
            "HEADWAY_HOME": str(tmp_path / home),
        }
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1]), result.stderr

    first, _ = run_program("first", "home")
    assert first["hits"] == 0
    assert first["misses"] > 0
    again, _ = run_program("second", "home")
    assert again["misses"] == 0
    assert again["hits"] == first["misses"]
    stranger, said = run_program("third", "elsewhere")  # with the key of another user
    assert stranger == first
    assert "was not sealed with this user's key" in said


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Home folder of Headway for the test."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_changed_artifacts_are_not_loaded(tmp_path, home, monkeypatch):
    taken = []
    monkeypatch.setattr(compiled.torch.compiler, "load_cache_artifacts", lambda data: taken.append(data) or "info")
    monkeypatch.setattr(compiled.torch.compiler, "save_cache_artifacts", lambda: (b"code", "info"))
    assert not compiled.load_artifacts(tmp_path)
    compiled.write_artifacts(tmp_path, Collectives(process.start(cpu=True)))
    path = tmp_path / compiled.FILE
    assert [each.name for each in tmp_path.iterdir() if each != home] == [compiled.FILE]
    assert compiled.load_artifacts(tmp_path)
    assert taken == [b"code"]
    (key,) = home.iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for place in (0, -1):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert not compiled.load_artifacts(tmp_path)
        data[place] ^= 1
        path.write_bytes(data)
    monkeypatch.setenv("HEADWAY_SECRET", "0123456789abcdef0123456789abcdef")
    assert not compiled.load_artifacts(tmp_path)
    path.unlink()
    path.mkdir()
    assert not compiled.load_artifacts(tmp_path)
    assert taken == [b"code"]


def test_no_file_is_written_if_nothing_was_compiled(tmp_path, home, monkeypatch):
    monkeypatch.setattr(compiled.torch.compiler, "save_cache_artifacts", lambda: None)
    compiled.write_artifacts(tmp_path, Collectives(process.start(cpu=True)))
    assert list(tmp_path.iterdir()) == []


def test_key_that_cannot_be_read_or_made_is_no_error(tmp_path, home, monkeypatch, caplog):
    """On many clusters, compute nodes cannot write to the home folder. Other ranks would wait for a rank that raises."""
    monkeypatch.setattr(compiled.torch.compiler, "save_cache_artifacts", lambda: (b"code", "info"))
    monkeypatch.setattr(compiled.torch.compiler, "load_cache_artifacts", lambda data: "info")
    collectives = Collectives(process.start(cpu=True))
    compiled.write_artifacts(tmp_path, collectives)
    shutil.rmtree(home)
    home.touch()  # no folder can be made here
    assert not compiled.load_artifacts(tmp_path)
    assert "was not loaded" in caplog.text
    (tmp_path / compiled.FILE).unlink()
    compiled.write_artifacts(tmp_path, collectives)
    assert "is not saved" in caplog.text
    assert [each for each in tmp_path.iterdir() if each != home] == []
