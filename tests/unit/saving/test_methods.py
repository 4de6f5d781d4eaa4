import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.checkpoint.layout import verify
from headway.errors import CheckpointError, ConfigError, StateError


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def build(model=None, **project):
    torch.manual_seed(0)
    project = {"project_dir": "run", "automatic_checkpoint_naming": True, **project}
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**project))
    model = model or torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    return accelerator, model, optimizer, loader


def learn(accelerator, model, optimizer, loader, num=None):
    for count, (x,) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if count == num:
            break


def names():
    return sorted(path.name for path in Path("run/checkpoints").iterdir())


def test_folders_are_numbered_and_the_newest_stay():
    accelerator, *_ = build(total_limit=2)
    for number in range(4):
        assert accelerator.save_iteration == number
        assert accelerator.save_state().name == f"checkpoint_{number}"
    assert names() == ["checkpoint_2", "checkpoint_3", "latest"]


def test_the_best_one_stays():
    accelerator, *_ = build(total_limit=1, keep_best="max")
    for metric in (0.1, 0.9, 0.5, 0.2):
        accelerator.save_state(metric=metric)
    assert names() == ["checkpoint_1", "checkpoint_3", "latest"]
    again, *_ = build(total_limit=1, keep_best="max")
    again.resume("latest")
    again.save_state(metric=0.3)
    assert names() == ["checkpoint_1", "checkpoint_4", "latest"]


def test_numbering_goes_on_after_a_load():
    accelerator, *_ = build()
    accelerator.save_state()
    accelerator.save_state()
    again, *_ = build()
    again.load_state()
    assert again.save_state().name == "checkpoint_2"
    back, *_ = build()
    back.load_state("run/checkpoints/checkpoint_0")
    assert back.save_state().name == "checkpoint_3"


def test_a_new_run_never_writes_over_an_old_one():
    accelerator, *_ = build()
    accelerator.save_state()
    again, *_ = build()
    with pytest.raises(CheckpointError, match="already has checkpoint_0, from an earlier run"):
        again.save_state()


def test_nothing_there_yet_is_no_error():
    accelerator, *_ = build()
    assert accelerator.resume("latest") is None
    assert list(accelerator.epochs(2)) == [0, 1]
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        accelerator.load_state()


def test_a_damaged_one_is_passed_over_and_named(caplog):
    accelerator, model, optimizer, loader = build()
    accelerator.save_state()
    learn(accelerator, model, optimizer, loader)
    bad = accelerator.save_state() / "model-00000.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    again, *_ = build()
    restored = again.resume("latest")
    assert restored.folder.name == "checkpoint_0"
    assert "checkpoint_1/model-00000.safetensors has" in caplog.text
    good = Path("run/checkpoints/checkpoint_0/manifest.json")
    good.write_text(good.read_text().replace('"num_updates": 0', '"num_updates": 1'))
    with pytest.raises(CheckpointError, match="all of them are damaged"):
        build()[0].resume("latest")


@pytest.mark.parametrize(("stop", "first"), [(3, 1), (None, 1)])
def test_epochs_begin_where_the_run_stood(stop, first):
    """A pass that was left is over: this process would go on with the next epoch."""
    accelerator, model, optimizer, loader = build()
    for _ in accelerator.epochs(3):
        learn(accelerator, model, optimizer, loader, stop)
        accelerator.save_state()
        break
    again, model, optimizer, loader = build()
    again.resume("latest")
    assert list(again.epochs(3)) == list(range(first, 3))


def test_a_plain_range_after_a_resume_raises_once():
    accelerator, *objects = build()
    accelerator.save_state()
    again, *objects = build()
    again.resume("latest")
    with pytest.raises(StateError, match=r"accelerator\.epochs\(num_epochs\)"):
        learn(again, *objects)
    learn(again, *objects)


def test_misfits_change_nothing():
    accelerator, *_ = build()
    folder = accelerator.save_state()
    again, model, *_ = build(torch.nn.Linear(4, 1))
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit what is prepared; nothing was changed.*shape \(1, 4\)"
    ):
        again.load_state(folder)
    assert torch.equal(model.weight, before)


def test_strict_refuses_what_differs():
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
    def __init__(self):
        self.values = [1]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_registered_objects_come_back():
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


def test_hooks_add_files_and_take_models_out():
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


def test_a_save_behind_the_loop_is_the_state_of_its_moment():
    accelerator, model, optimizer, loader = build()
    learn(accelerator, model, optimizer, loader)
    before = model.weight.detach().clone()
    folder = accelerator.save_state(blocking=False)
    learn(accelerator, model, optimizer, loader)
    accelerator.wait_for_save()
    again, model, *_ = build()
    again.load_state(folder)
    assert torch.equal(model.weight, before)


def test_a_write_that_fails_behind_the_loop_is_raised(monkeypatch):
    accelerator, model, optimizer, loader = build()
    accelerator.save_state()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.checkpoint.writer.write_shard", full)
    accelerator.save_state(blocking=False)
    accelerator._run_state.saver._background._thread.join()
    with pytest.raises(CheckpointError, match="No space left on device"):
        learn(accelerator, model, optimizer, loader)
    assert names() == ["checkpoint_0", "latest"]


def test_a_folder_is_needed_without_automatic_naming():
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
def test_a_save_behind_a_loop_that_ends_is_finished(tmp_path):
    ran = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    verify(tmp_path / "checkpoints" / "checkpoint_0")
