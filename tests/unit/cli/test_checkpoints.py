import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from headway.cli.main import group
from headway.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.test_layout import TENSORS, save


def run(*words):
    return CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=True)


def test_inspect_prints_what_is_there_and_verifies(tmp_path):
    save(tmp_path, about={"num_updates": 7, "versions": {"torch": "2.13"}})
    told = run("inspect", tmp_path / "checkpoint_1", "--tensors", "--verify").output
    assert "num updates: 7" in told
    assert "written by: torch 2.13" in told
    assert "model/0/a  float32 [3, 4]" in told
    assert "model/0/tied  tied to model/0/a" in told
    assert "optimizer/0  1 tensor, 12 values, 48 B" in told
    assert "files are as they were written" in told


def test_inspect_finds_damage_only_when_asked_to_read(tmp_path):
    save(tmp_path)
    path = tmp_path / "checkpoint_1" / "model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run("inspect", tmp_path / "checkpoint_1").exit_code == 0
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors is damaged"):
        raise run("inspect", tmp_path / "checkpoint_1", "--verify").exception
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        raise run("inspect", tmp_path).exception


def test_merge_writes_plain_weights(tmp_path):
    save(tmp_path)
    ran = run("merge", tmp_path / "checkpoint_1", tmp_path / "out")
    assert ran.output.strip() == str(tmp_path / "out" / "model.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["a"], TENSORS["model/0/a"])
    with pytest.raises(ConfigError, match="holds the models 0"):
        raise run("merge", tmp_path / "checkpoint_1", tmp_path / "out", "--model", "2").exception
