"""Test `headway inspect` and `headway merge` on valid, damaged and hostile checkpoints."""

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from headway.cli.main import group, main
from headway.errors import CheckpointError, ConfigError
from tests.unit.core.checkpoint.saved import TENSORS, save


def run_command(*words):
    """Run `headway` with the given words and return the result, which holds any exception."""
    return CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=True)


def test_inspect_prints_the_contents_and_verifies_them(tmp_path):
    save(tmp_path, about={"num_updates": 7, "versions": {"torch": "2.13"}})
    output = run_command("inspect", tmp_path / "checkpoint_1", "--tensors", "--verify").output
    assert "num updates: 7" in output
    assert "written by: torch 2.13" in output
    assert "model/0/a  float32 [3, 4]" in output
    assert "model/0/tied  tied to model/0/a" in output
    assert "optimizer/0  1 tensor, 12 values, 48 B" in output
    assert "files are as they were written, by their XXH3-128" in output
    assert ", each with its XXH3-128\n" in output


def test_inspect_detects_damage_only_with_verify(tmp_path):
    save(tmp_path)
    path = tmp_path / "checkpoint_1" / "model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run_command("inspect", tmp_path / "checkpoint_1").exit_code == 0
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors is damaged"):
        raise run_command("inspect", tmp_path / "checkpoint_1", "--verify").exception
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        raise run_command("inspect", tmp_path / "empty").exception
    with pytest.raises(CheckpointError, match=r"checkpoint_2 does not exist; .* holds checkpoint_1"):
        raise run_command("inspect", tmp_path / "checkpoint_2").exception


@pytest.mark.parametrize("folder", ["checkpoints", "."])
def test_inspect_lists_a_folder_of_checkpoints(tmp_path, folder):
    parent = tmp_path / "checkpoints"
    for number in (9, 10):
        about = {"num_updates": 10 * number, "epoch": 1, "saved_at": "2026-11-22T00:00:00Z"}
        save(parent, final=parent / f"checkpoint_{number}", nonce=f"{number:016x}", about=about)
    (parent / "checkpoint_9" / "manifest.json").write_text("{}")
    lines = run_command("inspect", tmp_path / folder).output.splitlines()
    assert lines[0] == f"{parent} holds 2 checkpoints, the newest first:"
    assert lines[1].startswith("  checkpoint_10  after 100 updates, epoch 1, ")
    assert lines[1].endswith(", saved 2026-11-22T00:00:00Z")
    assert lines[2].startswith("  checkpoint_9   damaged: ")
    assert lines[3] == f"for one of them: headway inspect {parent / 'checkpoint_10'}"
    with pytest.raises(ConfigError, match=r"folder of 2 checkpoints .*; give one of them"):
        raise run_command("inspect", tmp_path / folder, "--verify").exception
    (parent / "latest").write_text("checkpoint_10")
    with pytest.raises(CheckpointError, match=r"only names the newest .* give the checkpoint itself, .*checkpoint_10"):
        raise run_command("inspect", parent / "latest").exception


def test_merge_writes_plain_weights(tmp_path):
    save(tmp_path)
    ran = run_command("merge", tmp_path / "checkpoint_1", tmp_path / "out")
    assert ran.stdout.strip() == str(tmp_path / "out" / "model.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["a"], TENSORS["model/0/a"])
    with pytest.raises(ConfigError, match="contains the models 0"):
        raise run_command("merge", tmp_path / "checkpoint_1", tmp_path / "new", "--model", "2").exception


def test_merge_overwrites_weights_only_with_overwrite(tmp_path):
    save(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    weights = out / "model-00001-of-00002.safetensors"
    weights.write_text("precious")
    with pytest.raises(ConfigError, match=r"already contains weights \(model-00001-of-00002.*--overwrite"):
        raise run_command("merge", tmp_path / "checkpoint_1", out).exception
    assert weights.read_text() == "precious"
    assert run_command("merge", tmp_path / "checkpoint_1", out, "--overwrite").exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    for place, said in ((out / "config.json", "is not a folder"), (Path("/dev/null"), "is not a folder"),
                        (tmp_path / "checkpoint_1", "is a checkpoint; give another folder")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            raise run_command("merge", tmp_path / "checkpoint_1", place, "--overwrite").exception


def save_hostile_checkpoint(tmp_path):
    """Save a checkpoint whose names contain terminal escape sequences, and return its path."""
    save(tmp_path, about={"num_updates": 7, "device": "\x1b[2J", "versions": {"torch\x1b[1m": "\u202e1"}},
         tensors={**TENSORS, "model/abc/w\x1b[31m": torch.ones(2)})  # fmt: skip
    return tmp_path / "checkpoint_1"


def test_inspect_escapes_terminal_control_characters(tmp_path):
    folder = save_hostile_checkpoint(tmp_path)
    for words in ((folder, "--tensors", "--verify"), (tmp_path,)):
        ran = run_command("inspect", *words)
        assert ran.exit_code == 0
        assert "\x1b" not in ran.output
        assert "\u202e" not in ran.output
    assert "model/abc/w\\x1b[31m  float32 [2]" in run_command("inspect", folder, "--tensors").output
    assert "device: \\x1b[2J" in run_command("inspect", folder).output


def test_errors_escape_terminal_control_characters(tmp_path, capsys):
    (tmp_path / "\x1b[2J").mkdir()
    with pytest.raises(SystemExit) as exc_info:
        main(["inspect", str(tmp_path / "\x1b[2J")])
    assert exc_info.value.code == 1
    output = capsys.readouterr().err
    assert "\\x1b[2J is not a committed checkpoint" in output
    assert "\x1b" not in output


def test_merge_names_models_whose_names_are_not_numbers(tmp_path):
    folder = save_hostile_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"--model 5: .* contains the models 0, abc$"):
        raise run_command("merge", folder, tmp_path / "out", "--model", "5").exception
    assert run_command("merge", folder, tmp_path / "out").exit_code == 0


def test_merge_into_a_path_that_is_not_a_folder_is_refused(tmp_path):
    save(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "file" / "out", Path("/dev/null/out"), tmp_path / "broken"):
        with pytest.raises(ConfigError, match="is not a folder"):
            raise run_command("merge", tmp_path / "checkpoint_1", place).exception
    with pytest.raises(CheckpointError, match=r"the weights cannot be written to .*too long"):
        raise run_command("merge", tmp_path / "checkpoint_1", tmp_path / ("n" * 300)).exception


def test_pipe_is_refused_without_waiting(tmp_path):
    save(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for words in (("inspect", tmp_path / "pipe"), ("merge", tmp_path / "pipe", tmp_path / "out")):
        with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
            raise run_command(*words).exception
    (tmp_path / "checkpoint_1" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "checkpoint_1" / "manifest.json")
    with pytest.raises(CheckpointError, match="is a pipe, not a regular file"):
        raise run_command("inspect", tmp_path / "checkpoint_1").exception
