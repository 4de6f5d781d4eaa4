"""Test in-memory checkpoints on one process: the one from which a run resumes, its content, and failures."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.common import env
from headway.core.checkpoint import folders
from headway.core.checkpoint.saving import writer


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Folder for in-memory checkpoints, which the agent would create."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(env.MEMORY, str(folder))
    return folder


def run_training(tmp_path, stop_after=None, every=1, save_at=(), each=lambda number, model: None, **options):
    """Train for two epochs of four updates, from where a resume begins. Return the loss by update, and the restored state."""
    set_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    x = torch.randn(32, 4)
    project = ProjectConfiguration(tmp_path / "run", automatic_checkpoint_naming=True, keep_in_memory=every, **options)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
    )
    restored, losses = accelerator.resume("latest"), {}
    for epoch in accelerator.epochs(2):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                number = accelerator.num_updates
                losses[number] = loss.item()
                each(number, model)
                if number in save_at:
                    accelerator.save_state()
                if number == stop_after:
                    accelerator._checkpoints._memory.finish_save()
                    accelerator.end_training()
                    return losses, restored
    accelerator.end_training()
    return losses, restored


def list_copies(memory):
    (folder,) = memory.iterdir()
    return folders.list_committed(folder)


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_run_equals_the_uninterrupted_run(every, memory, tmp_path):
    whole, _ = run_training(tmp_path / "whole", every=0)
    first, _ = run_training(tmp_path, stop_after=6, every=every)
    assert [each.name for each in list_copies(memory)] == (["update_5", "update_4"] if every == 1 else ["update_1"])
    rest, restored = run_training(tmp_path, every=every)
    assert restored.about["num_updates"] == (5 if every == 1 else 3)
    assert {**first, **rest} == whole
    assert min(rest) == restored.about["num_updates"] + 1


@pytest.mark.parametrize(("save_at", "stop_after", "is_memory"), [(2, 6, True), (6, 6, False), (5, 6, True)])
def test_newer_checkpoint_is_resumed(save_at, stop_after, is_memory, memory, tmp_path):
    whole, _ = run_training(tmp_path / "whole", every=0)
    first, _ = run_training(tmp_path, stop_after=stop_after, save_at=(save_at,))
    rest, restored = run_training(tmp_path, save_at=(7,))
    assert (memory in restored.folder.parents) == is_memory
    assert {**first, **rest} == whole
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_*"))
    assert saved == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_flipped_byte_falls_back_to_an_older_checkpoint(num_damaged, memory, tmp_path, caplog):
    whole, _ = run_training(tmp_path / "whole", every=0)
    first, _ = run_training(tmp_path, stop_after=6, save_at=(2,))
    for folder in list_copies(memory)[:num_damaged]:
        path = folder / "optimizer-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        rest, restored = run_training(tmp_path)
    assert restored.about["num_updates"] == (4 if num_damaged == 1 else 2)
    assert (memory in restored.folder.parents) == (num_damaged == 1)
    assert caplog.text.count("is damaged") == num_damaged
    assert {**first, **rest} == whole


def test_resumed_checkpoint_is_newer_than_the_damaged_one(memory, tmp_path):
    run_training(tmp_path, stop_after=6, save_at=(2,))
    for folder in list_copies(memory):
        (folder / "manifest.json").write_text("{}")
    run_training(tmp_path, stop_after=4)
    _, restored = run_training(tmp_path)
    assert restored.about["num_updates"] == 3  # kept in memory after the resume from the disk
    assert memory in restored.folder.parents


def test_training_continues_when_shared_memory_is_full(memory, tmp_path, monkeypatch, caplog):
    real = writer.write_shards

    def write_shards(folder, files, num_files):
        if memory in folder.parents:
            raise OSError(28, "No space left on device")
        return real(folder, files, num_files)

    monkeypatch.setattr(writer, "write_shards", write_shards)
    whole, _ = run_training(tmp_path / "whole", every=0)
    with caplog.at_level(logging.WARNING):
        losses, _ = run_training(tmp_path, save_at=(4,))
    assert losses == whole
    assert caplog.text.count("keep_in_memory stops") == 1
    assert "No space left" in caplog.text
    assert list(memory.iterdir()) == []


def test_change_during_the_save_is_noticed(memory, tmp_path, monkeypatch, caplog):
    real = writer.write_shards
    changed = []

    def write_shards(folder, files, num_files):
        for name, tensor in (each for tensors in files.values() for each in tensors):
            if memory in folder.parents and name == "model/0/0.weight":
                changed.append(name)
                tensor.add_(0)  # changes the parameter itself
        return real(folder, files, num_files)

    monkeypatch.setattr(writer, "write_shards", write_shards)
    with caplog.at_level(logging.WARNING):
        run_training(tmp_path)
    assert changed == ["model/0/0.weight"]
    assert "0.weight was changed while it was saved" in caplog.text


def test_run_without_an_agent_causes_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(env.MEMORY, raising=False)
    whole, _ = run_training(tmp_path / "whole", every=0)
    with caplog.at_level(logging.WARNING):
        losses, _ = run_training(tmp_path)
    assert losses == whole
    assert caplog.text.count("keep_in_memory has no effect") == 1
