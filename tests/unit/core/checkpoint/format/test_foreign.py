"""Test messages for folders that are not Headway checkpoints, such as checkpoints of Accelerate or single weight files."""

import subprocess
import sys

import pytest
import torch

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.format.foreign import explain_path
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.saved import save

ACCELERATE = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
torch.nn.init.constant_(model.weight, 0.25)
accelerator.prepare(model, optimizer, scheduler)
accelerator.save_state(sys.argv[1], safe_serialization=sys.argv[2] == "safe")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safe", "pickled"])
def test_checkpoint_of_accelerate_is_named_and_its_weights_load_as_advised(tmp_path, kind):
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_7"
    subprocess.run([sys.executable, "-c", ACCELERATE, str(folder), kind], check=True, capture_output=True, timeout=120)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(tmp_path / "run", automatic_checkpoint_naming=True)
    )
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    file = folder / ("model.safetensors" if kind == "safe" else "pytorch_model.bin")
    told = f'load_checkpoint_in_model(model, "{file}")'
    for load in (
        lambda: accelerator.load_state(folder),
        lambda: accelerator.resume(folder),
        lambda: accelerator.resume("latest"),
    ):
        with pytest.raises(CheckpointError, match="is a checkpoint of Accelerate") as exc_info:
            load()
        assert told in str(exc_info.value)
        assert "optimizer.bin" in str(exc_info.value)
    from headway import load_checkpoint_in_model

    fresh = torch.nn.Linear(3, 1)
    load_checkpoint_in_model(fresh, str(file))
    assert torch.equal(fresh.weight, torch.full((1, 3), 0.25))
    assert model.weight is not None


@pytest.mark.parametrize(("files", "said"), [
    (["trainer_state.json", "optimizer.pt", "model.safetensors"], "a checkpoint of transformers' Trainer (trainer_state.json), not"),
    ([".metadata", "__0_0.distcp"], "a checkpoint of torch.distributed.checkpoint"),
    (["zero_to_fp32.py", "latest"], "a checkpoint of DeepSpeed"),
    (["random_states_0.pkl", "sampler.bin", "scheduler.bin", "optimizer.bin"],
     "(optimizer.bin, random_states_0.pkl, sampler.bin and 1 more)"),
    (["model.safetensors"], "contains weights, but is not a checkpoint of Headway"),
    (["notes.txt"], "is not a committed checkpoint: it has no manifest.json; give a folder that save_state wrote"),
])  # fmt: skip
def test_checkpoints_of_other_programs_are_named(tmp_path, files, said):
    for name in files:
        (tmp_path / name).touch()
    assert said in explain_path(tmp_path)
    with pytest.raises(CheckpointError):
        read_manifest(tmp_path)


def test_missing_paths_files_and_parent_folders_are_explained(tmp_path):
    for number in (9, 10):
        save(tmp_path / "checkpoints", final=tmp_path / "checkpoints" / f"checkpoint_{number}", nonce=f"{number:016x}")
    parent = tmp_path / "checkpoints"
    listed = "checkpoint_10, checkpoint_9"
    assert explain_path(parent / "checkpoint_3") == f"{parent / 'checkpoint_3'} does not exist; {parent} holds {listed}"
    assert explain_path(tmp_path / "a" / "b") == (
        f"{tmp_path / 'a' / 'b'} does not exist, and neither does {tmp_path / 'a'}; give a folder that save_state wrote"
    )
    assert explain_path(tmp_path / "last").endswith(
        'save_state wrote, or resume("latest") for the newest automatic one'
    )
    file = parent / "checkpoint_9" / "manifest.json"
    assert explain_path(file).endswith(f"give its folder, {parent / 'checkpoint_9'}")
    for folder in (parent, tmp_path):
        assert (
            explain_path(folder)
            == f"{parent} is a folder of 2 checkpoints ({listed}); give one of them, as in {parent / 'checkpoint_10'}"
        )
