"""Test that `load_state` loads a checkpoint folder of Accelerate completely or changes nothing."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import ProjectConfiguration
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.errors import CheckpointError


class Net(torch.nn.Module):
    """Two linear layers and a buffer, which is expanded from one row or has different rows."""

    def __init__(self, value, is_expanded=True):
        super().__init__()
        torch.manual_seed(value)
        self.first, self.last = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        scale = torch.full((1, 3), float(value)).expand(4, 3)
        self.register_buffer("scale", scale if is_expanded else scale * torch.arange(1.0, 5.0)[:, None])


class Refusing:
    """Object whose state cannot be loaded."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("not that")


def build_prepared(value, **options):
    accelerator = AccelerateAccelerator(cpu=True)
    model = Net(value, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + value), momentum=0.9)
    return accelerator, *accelerator.prepare(model, optimizer)


def write_accelerate_folder(folder, model, optimizer):
    """Write the files of Accelerate's save_state that `load_state` needs here."""
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")


def test_expanded_buffer_is_loaded(tmp_path):
    _, model, optimizer = build_prepared(1)
    write_accelerate_folder(tmp_path / "theirs", model, optimizer)
    accelerator, other, other_optimizer = build_prepared(2)
    accelerator.load_state(str(tmp_path / "theirs"))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("what", ["an expanded buffer", "a shape", "an object", "a missing weight", "random states"])
def test_misfit_changes_nothing(what, tmp_path):
    _, model, optimizer = build_prepared(1, is_expanded=what != "an expanded buffer")
    if what == "a shape":
        model.last = torch.nn.Linear(3, 2)
    write_accelerate_folder(tmp_path / "theirs", model, optimizer)
    accelerator, other, other_optimizer = build_prepared(2)
    if what == "a missing weight":
        remove_weight(tmp_path / "theirs", "last.bias")
    if what == "random states":
        torch.save({"random_state": (3, (1, 2), None)}, tmp_path / "theirs" / "random_states_0.pkl")
    if what == "an object":
        torch.save({}, tmp_path / "theirs" / "custom_checkpoint_0.pkl")
        accelerator.register_for_checkpointing(Refusing())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="nothing was changed"):
        accelerator.load_state(str(tmp_path / "theirs"))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.3)


def remove_weight(folder, name):
    """Remove one weight from a folder that `write_accelerate_folder` has written."""
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")


def test_missing_weight_is_left_unchanged_without_strict(tmp_path):
    _, model, optimizer = build_prepared(1)
    write_accelerate_folder(tmp_path / "theirs", model, optimizer)
    remove_weight(tmp_path / "theirs", "last.bias")
    accelerator, other, _ = build_prepared(2)
    bias = other.state_dict()["last.bias"].clone()
    accelerator.load_state(str(tmp_path / "theirs"), strict=False)
    expected = {**model.state_dict(), "last.bias": bias}
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in expected.items())


def test_staging_folder_of_a_killed_save_is_not_a_checkpoint(tmp_path):
    """The folder contains Accelerate's files, and its name ends in a digit."""
    _, model, optimizer = build_prepared(1)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = AccelerateAccelerator(cpu=True, project_config=project)
    accelerator.prepare(Net(2))
    saved = accelerator.save_state()
    left = saved.parent / ".staging-checkpoint_7-0123456789abcde7"
    write_accelerate_folder(left, model, optimizer)
    assert accelerator.load_state().folder == saved
    with pytest.raises(CheckpointError, match="checkpoint_0"):
        accelerator.load_state(str(left))


def test_files_contain_what_save_hooks_left(tmp_path):
    """The values are compared with those of the models, which have equal names."""
    accelerator = AccelerateAccelerator(cpu=True)
    first, second = accelerator.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    accelerator.save_state(tmp_path / "removed")
    handle.remove()
    assert torch.equal(load_file(tmp_path / "removed" / "model.safetensors")["weight"], second.weight)
    assert not (tmp_path / "removed" / "model_1.safetensors").exists()
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: weights[0].update(weight=torch.zeros(1, 2))
    )
    accelerator.save_state(tmp_path / "changed")
    found = load_file(tmp_path / "changed" / "model.safetensors")
    assert torch.equal(found["weight"], torch.zeros(1, 2))
    assert torch.equal(found["bias"], first.bias)
    assert torch.equal(load_file(tmp_path / "changed" / "model_1.safetensors")["weight"], second.weight)
