"""Test the Accelerator's methods for checkpoints: names, rotation, resuming, registered objects, hooks and errors."""

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.tracking.runlog_reader import read_run
from headway.errors import CheckpointError, ConfigError, StateError


@pytest.fixture(autouse=True)
def _run_in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def build(model=None, **project):
    """Return an Accelerator with automatic names in `run/`, and a prepared linear model, optimizer and loader."""
    torch.manual_seed(0)
    project = {"project_dir": "run", "automatic_checkpoint_naming": True, **project}
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**project))
    model = model or torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    return accelerator, model, optimizer, loader


def train_epoch(accelerator, model, optimizer, loader, num=None):
    """Train on the loader, or on `num` batches of it."""
    for count, (x,) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if count == num:
            break


def list_names():
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def test_folders_are_numbered_and_the_newest_are_kept():
    accelerator, *_ = build(total_limit=2)
    for number in range(4):
        assert accelerator.save_iteration == number
        assert accelerator.save_state().name == f"checkpoint_{number}"
    assert list_names() == ["checkpoint_2", "checkpoint_3", "latest"]


def test_relative_folder_is_resolved_when_the_run_begins(monkeypatch, tmp_path):
    """A script that changes its working directory keeps one folder of checkpoints."""
    accelerator, *_ = build(total_limit=2)
    Path("elsewhere").mkdir()
    saved = [accelerator.save_state()]
    monkeypatch.chdir("elsewhere")
    saved += [accelerator.save_state(), accelerator.save_state()]
    assert {path.parent for path in saved} == {tmp_path / "run" / "checkpoints"}
    assert accelerator.load_state().folder == saved[-1]
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert list_names() == ["checkpoint_1", "checkpoint_2", "latest"]


def test_best_checkpoint_is_kept():
    accelerator, *_ = build(total_limit=1, keep_best="max")
    for metric in (0.1, 0.9, 0.5, 0.2):
        accelerator.save_state(metric=metric)
    assert list_names() == ["checkpoint_1", "checkpoint_3", "latest"]
    again, *_ = build(total_limit=1, keep_best="max")
    again.resume("latest")
    again.save_state(metric=0.3)
    assert list_names() == ["checkpoint_1", "checkpoint_4", "latest"]


def test_numbering_continues_after_a_load():
    accelerator, *_ = build()
    accelerator.save_state()
    accelerator.save_state()
    again, *_ = build()
    again.load_state()
    assert again.save_state().name == "checkpoint_2"
    back, *_ = build()
    back.load_state("run/checkpoints/checkpoint_0")
    assert back.save_state().name == "checkpoint_3"


def test_new_run_never_overwrites_an_earlier_one():
    accelerator, *_ = build()
    accelerator.save_state()
    again, *_ = build()
    with pytest.raises(CheckpointError, match="already has checkpoint_0, from an earlier run"):
        again.save_state()


def test_forgotten_resume_is_an_error_before_training():
    accelerator, *objects = build()
    train_epoch(accelerator, *objects)
    accelerator.save_state()
    for train in (train_epoch, train_with_backward, train_with_forward_backward):
        again, model, *rest = build()
        before = model.weight.detach().clone()
        with pytest.raises(
            CheckpointError, match=r"already has checkpoint_0, from an earlier run.*accelerator\.resume"
        ):
            train(again, model, *rest)
        assert torch.equal(model.weight, before)


def train_with_backward(accelerator, model, optimizer, loader):
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()


def train_with_forward_backward(accelerator, model, optimizer, loader):
    for (x,) in loader:
        accelerator.forward_backward((x,), lambda piece: model(piece[0]).mean())


@pytest.mark.parametrize("act", [
    lambda accelerator: accelerator.resume("latest"), lambda accelerator: accelerator.load_state(),
    lambda accelerator: accelerator.load_state("run/checkpoints/checkpoint_0"),
    lambda accelerator: shutil.rmtree("run"),
    lambda accelerator: setattr(accelerator, "project_configuration", replace(accelerator.project_configuration, project_dir="b")),
])  # fmt: skip
def test_resume_or_another_folder_causes_no_error(act):
    accelerator, *_ = build()
    accelerator.save_state()
    again, *objects = build()
    act(again)
    list(again.epochs(0))
    train_epoch(again, *objects)
    again.save_state()
    train_epoch(again, *objects)


def test_evaluation_in_a_used_folder_is_allowed():
    accelerator, *_ = build()
    accelerator.save_state()
    again, model, _, loader = build()
    with torch.no_grad():
        assert sum(len(again.gather_for_metrics(model(x))) for (x,) in loader) == 12
    numbered, *objects = build(iteration=1)  # continues the numbers of the earlier run
    train_epoch(numbered, *objects)
    by_hand, *objects = build(automatic_checkpoint_naming=False)
    train_epoch(by_hand, *objects)


def test_resume_without_checkpoints_is_no_error():
    accelerator, *_ = build()
    assert accelerator.resume("latest") is None
    assert list(accelerator.epochs(2)) == [0, 1]
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        accelerator.load_state()


@pytest.mark.parametrize("automatic", [True, False])
def test_latest_without_automatic_naming_warns_that_it_finds_nothing(automatic, caplog):
    accelerator, *_ = build(automatic_checkpoint_naming=automatic)
    accelerator.save_state(None if automatic else "run/mine")
    again, *_ = build(automatic_checkpoint_naming=automatic)
    assert (again.resume("latest") is None) == (not automatic)
    assert ("This run names none itself" in caplog.text) == (not automatic)


def test_resume_before_prepare_names_the_right_order():
    build()[0].save_state()
    with pytest.raises(CheckpointError, match=r"1 models were saved, 0 are prepared: prepare\(\) comes before"):
        Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True)).resume()


def test_damaged_checkpoint_is_skipped_and_named(caplog):
    accelerator, model, optimizer, loader = build()
    accelerator.save_state()
    train_epoch(accelerator, model, optimizer, loader)
    bad = accelerator.save_state() / "model-00000.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    again, *_ = build()
    restored = again.resume("latest")
    assert restored.folder.name == "checkpoint_0"
    assert "checkpoint_1/model-00000.safetensors has" in caplog.text
    good = Path("run/checkpoints/checkpoint_0/manifest.json")
    good.write_text(good.read_text().replace('"num_updates":0', '"num_updates":1'))
    with pytest.raises(CheckpointError, match="all of them are damaged"):
        build()[0].resume("latest")


@pytest.mark.parametrize(("stop", "first"), [(3, 1), (None, 1)])
def test_epochs_begin_at_the_saved_epoch(stop, first):
    """A pass that was interrupted is over, so the next epoch begins."""
    accelerator, model, optimizer, loader = build()
    for _ in accelerator.epochs(3):
        train_epoch(accelerator, model, optimizer, loader, stop)
        accelerator.save_state()
        break
    again, model, optimizer, loader = build()
    again.resume("latest")
    assert list(again.epochs(3)) == list(range(first, 3))


def test_plain_range_after_a_resume_raises_once():
    accelerator, *objects = build()
    accelerator.save_state()
    again, *objects = build()
    again.resume("latest")
    with pytest.raises(StateError, match=r"accelerator\.epochs\(num_epochs\)"):
        train_epoch(again, *objects)
    train_epoch(again, *objects)


def test_evaluation_can_come_between_the_resume_and_the_loop():
    accelerator, *_ = build()
    accelerator.save_state()
    again, model, optimizer, loader, *_ = build()
    again.resume("latest")
    for _ in loader:
        pass
    for _ in again.epochs(1):
        train_epoch(again, model, optimizer, loader)


def test_misfit_changes_nothing():
    accelerator, *_ = build()
    folder = accelerator.save_state()
    again, model, *_ = build(torch.nn.Linear(4, 1))
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit what is prepared; nothing was changed.*shape \(1, 4\)"
    ):
        again.load_state(folder)
    assert torch.equal(model.weight, before)


def test_strict_load_refuses_differences():
    accelerator, *_ = build()
    folder = accelerator.save_state()
    torch.manual_seed(0)
    again = Accelerator(cpu=True, mixed_precision="bf16")
    model = torch.nn.Linear(3, 1)
    again.prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2)
    )
    with pytest.raises(CheckpointError, match="mixed_precision no -> bf16"):
        again.load_state(folder, strict=True)
    assert again.load_state(folder).differences == ["mixed_precision no -> bf16"]


class Counter:
    """Object with a list as its state."""

    def __init__(self):
        self.values = [1]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_registered_objects_are_restored():
    accelerator, *_ = build()
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.values = [1, 2, (3,)]
    folder = accelerator.save_state()
    again, *_ = build()
    with pytest.raises(CheckpointError, match="1 states of kind 'custom' were saved, there are 0"):
        again.load_state(folder)
    counter = Counter()
    again.register_for_checkpointing(counter)
    again.load_state(folder)
    assert counter.values == [1, 2, (3,)]
    with pytest.raises(ConfigError, match="list without state_dict"):
        again.register_for_checkpointing([])


def test_hooks_add_files_and_remove_models():
    accelerator, *_ = build()

    def save(models, weights, folder):
        Path(folder, "mine").mkdir()
        Path(folder, "mine", "config.json").write_text(json.dumps({"in": models[0].in_features}))
        weights.pop()

    def load(models, folder):
        assert json.loads(Path(folder, "mine", "config.json").read_text()) == {"in": 3}
        models.pop()

    handle = accelerator.register_save_state_pre_hook(save)
    folder = accelerator.save_state()
    assert not (folder / "model-00000.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"model/0/weight is not in the checkpoint"):
        accelerator.load_state(folder)
    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(folder)
    (folder / "mine" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"mine/config\.json"):
        accelerator.load_state(folder)
    handle.remove()
    assert (accelerator.save_state() / "model-00000.safetensors").exists()


class Drawing(Counter):
    """Counter whose `state_dict` draws from all generators."""

    def state_dict(self):
        draw_random_numbers()
        return super().state_dict()


def draw_random_numbers():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("blocking", [True, False])
def test_rng_states_are_read_after_hooks_that_draw_random_numbers(blocking):
    accelerator, *_ = build()
    accelerator.register_for_checkpointing(Drawing())
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: draw_random_numbers())
    folder = accelerator.save_state(blocking=blocking)
    after = draw_random_numbers()
    accelerator.wait_for_save()
    again, *_ = build()
    again.register_for_checkpointing(Drawing())
    again.load_state(folder)
    assert draw_random_numbers() == after


def test_losses_after_a_save_with_a_drawing_hook_equal_those_of_the_resumed_run():
    def train_and_list_losses(accelerator, model, optimizer, loader):
        found = []
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(torch.nn.functional.dropout(x, 0.5)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    accelerator, *objects = build()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: torch.randn(7))
    train_and_list_losses(accelerator, *objects)
    folder = accelerator.save_state()
    whole = train_and_list_losses(accelerator, *objects)
    again, *objects = build()
    again.load_state(folder)
    assert train_and_list_losses(again, *objects) == whole


@pytest.mark.parametrize("given", [
    {"map_location": None}, {"map_location": "cpu"}, {"map_location": "on_device"}, {"map_location": torch.device("cpu")},
    {"load_kwargs": {"map_location": "cpu", "weights_only": False}}, {"load_kwargs": None}, {"load_module_strict": False},
])  # fmt: skip
def test_load_accepts_the_arguments_of_accelerate(given):
    accelerator, model, *_ = build()
    folder = accelerator.save_state()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(folder, **given)
    assert model.weight.abs().sum() > 0


def test_unknown_arguments_are_errors():
    accelerator, *_ = build()
    folder = accelerator.save_state(client_state={}, exclude_frozen_parameters=True)
    with pytest.raises(ConfigError, match=r"load_state\(\) has no argument 'maplocation'; did you mean map_location"):
        accelerator.load_state(folder, maplocation="cpu")
    with pytest.raises(ConfigError, match=r"map_location='somewhere'.*allowed: None, 'cpu', 'on_device'"):
        accelerator.load_state(folder, map_location="somewhere")
    with pytest.raises(ConfigError, match=r"load_state\(\) has no argument 'zzz'; allowed: input_dir"):
        accelerator.load_state(folder, {"zzz": 1})
    with pytest.raises(ConfigError, match=r"save_state\(\) has no argument 'blokcing'; did you mean blocking"):
        accelerator.save_state(blokcing=False)
    assert list_names() == ["checkpoint_0", "latest"]


def test_missing_folder_or_file_is_an_error():
    accelerator, *_ = build()
    folder = accelerator.save_state()
    with pytest.raises(CheckpointError, match=r"checkpoint_9 does not exist; .* holds checkpoint_0"):
        accelerator.load_state(folder.parent / "checkpoint_9")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        accelerator.resume(folder / "model-00000.safetensors")
    with pytest.raises(CheckpointError, match="is a folder with one checkpoint in it"):
        accelerator.load_state("run")


def test_event_of_a_save_contains_its_size():
    accelerator, *_ = build(logging_dir="run")
    accelerator.init_trackers("log")
    folder = accelerator.save_state()
    accelerator.end_training()
    (event,) = [event for event in read_run("run/log").events if event.name == "checkpoint"]
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"]
    assert event.details == {"folder": str(folder), "bytes": sum(sizes)}


def test_background_save_holds_the_state_at_its_call():
    accelerator, model, optimizer, loader = build()
    train_epoch(accelerator, model, optimizer, loader)
    before = model.weight.detach().clone()
    folder = accelerator.save_state(blocking=False)
    train_epoch(accelerator, model, optimizer, loader)
    accelerator.wait_for_save()
    again, model, *_ = build()
    again.load_state(folder)
    assert torch.equal(model.weight, before)


def test_failed_background_write_is_raised(monkeypatch):
    accelerator, model, optimizer, loader = build()
    accelerator.save_state()

    def fail_with_full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.core.checkpoint.saving.writer.write_shards", fail_with_full_disk)
    accelerator.save_state(blocking=False)
    accelerator._checkpoint_state.saver._joint_save._thread.join()
    with pytest.raises(CheckpointError, match="No space left on device"):
        train_epoch(accelerator, model, optimizer, loader)
    assert list_names() == ["checkpoint_0", "latest"]


def test_save_and_load_need_a_folder_without_automatic_naming():
    accelerator = Accelerator(cpu=True)
    for act in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigError, match="needs a folder"):
            act()
    with pytest.raises(ConfigError, match="total_limit"):
        ProjectConfiguration(total_limit=0)
    with pytest.raises(ConfigError, match="keep_best"):
        ProjectConfiguration(keep_best="best")


LEAVES = """
import sys, torch
from headway import Accelerator, ProjectConfiguration
project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(2000, 2000))
accelerator.save_state(blocking=False)
"""


@pytest.mark.slow
def test_background_save_is_finished_at_exit(tmp_path):
    result = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    verify_checkpoint(tmp_path / "checkpoints" / "checkpoint_0")


def test_failure_after_the_commit_does_not_fail_later_saves(monkeypatch, caplog):
    """If an old checkpoint cannot be removed, the save succeeds, and later saves continue."""
    accelerator, *_ = build(total_limit=1)
    accelerator.save_state()
    real = shutil.rmtree

    def fail_for_one_folder(path, *args, **kwargs):
        if Path(path).name == ".removing-checkpoint_0":
            raise OSError(5, "Input/output error", str(path))
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail_for_one_folder)
        assert [accelerator.save_state().name for _ in range(3)] == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert list_names() == [".removing-checkpoint_0", "checkpoint_3", "latest"]
    assert caplog.text.count("could not be removed") == 2  # once by its name, and once as a leftover
    accelerator.save_state(blocking=False)
    accelerator.wait_for_save()
    assert list_names() == ["checkpoint_4", "latest"]


def test_link_among_the_checkpoints_is_removed_without_its_target():
    accelerator, *_ = build(total_limit=1)
    folder = accelerator.save_state()
    folder.rename("elsewhere")
    folder.symlink_to(Path("elsewhere").absolute(), target_is_directory=True)
    accelerator.save_state()
    accelerator.save_state()
    assert list_names() == ["checkpoint_2", "latest"]
    verify_checkpoint(Path("elsewhere"))


def test_unwritable_latest_file_does_not_fail_a_save(caplog):
    accelerator, *_ = build()
    Path("run/checkpoints/latest/x").mkdir(parents=True)
    verify_checkpoint(accelerator.save_state())
    verify_checkpoint(accelerator.save_state())
    assert "the file 'latest' next to it could not be written" in caplog.text


def test_checkpoint_can_be_named_latest(caplog):
    accelerator, *objects = build(automatic_checkpoint_naming=False)
    for name in ("latest", "step_1"):
        train_epoch(accelerator, *objects, num=1)
        accelerator.save_state(name)
    assert "could not be written" not in caplog.text
    again, *_ = build(automatic_checkpoint_naming=False)
    assert again.resume("latest") is None
    assert again.resume(Path("latest")).about["num_updates"] == again.resume("./latest").about["num_updates"] == 1


def test_link_named_latest_is_kept():
    accelerator, *_ = build(automatic_checkpoint_naming=False)
    accelerator.save_state("checkpoints/first")
    Path("checkpoints/latest").unlink()
    Path("checkpoints/latest").symlink_to("first")
    accelerator.save_state("checkpoints/second")
    assert Path("checkpoints/latest").is_symlink()


@pytest.mark.parametrize("load", ["resume", "load_state"])
def test_newest_checkpoint_is_compared_with_its_hashes_in_one_pass(load, monkeypatch):
    accelerator, model, optimizer, loader = build()
    train_epoch(accelerator, model, optimizer, loader)
    folder = accelerator.save_state()
    lengths = []

    def read(descriptor, buffers, offset):
        lengths.append(sum(map(len, buffers)))
        return os.readv(descriptor, buffers) if os.lseek(descriptor, offset, os.SEEK_SET) == offset else -1

    again, *_ = build()
    monkeypatch.setattr(os, "preadv", read)
    assert (again.resume("latest") if load == "resume" else again.load_state()).folder == folder
    assert sum(lengths) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
