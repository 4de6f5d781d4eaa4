"""Tests that extra state of modules, saved as `save_model` recommends, is loaded by every function that loads weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headway import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from headway.errors import CheckpointError, ConfigError
from tests.distributed.ranks import run_ranks

EXTRAS = {
    "numbers": {"scale": 3, "amax": torch.ones(2), "name": "e4m3", "steps": [1, 2]},
    "a number": 7,
    "nothing": None,
    "a tensor": torch.arange(3.0),
}


class Scaled(nn.Linear):
    extra: object = "unset"

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def build(extra="unset"):
    model = nn.Sequential(Scaled(2, 2), nn.Sequential(Scaled(2, 2)), nn.Linear(2, 2))
    model[0].extra, model[1][0].extra = extra, extra
    return model


def has_same_value(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b)


def save_and_load(folder, strategy, name):
    """Save as safetensors, or pickled where that is refused, and load with each function."""
    accelerator, model = Accelerator(cpu=True, strategy=strategy), build(EXTRAS[name])
    weights = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    model = accelerator.prepare(model)
    if isinstance(EXTRAS[name], torch.Tensor):
        accelerator.save_model(model, folder)
    else:
        with pytest.raises(ConfigError, match="safe_serialization=False"):
            accelerator.save_model(model, folder)
        accelerator.save_model(model, folder, safe_serialization=False)
    accelerator.wait_for_everyone()
    empty = build()
    load_checkpoint_in_model(empty, folder, strict=True)
    with init_empty_weights():
        dispatched = build()
    dispatched = load_checkpoint_and_dispatch(dispatched, folder, device_map={"": "cpu"})
    later = Accelerator(cpu=True, strategy=strategy)
    streamed = build()
    later.load_weights(streamed, folder)
    later.prepare(streamed)
    for loaded in (empty, dispatched, streamed):
        for module in (loaded[0], loaded[1][0]):
            assert has_same_value(module.extra, EXTRAS[name]), loaded
    state = empty.state_dict()
    assert all(torch.equal(state[key], value) for key, value in weights.items())


@pytest.mark.parametrize(
    ("strategy", "world_size", "name"),
    [
        ("fsdp", 2, "numbers"),
        ("ddp", 1, "a tensor"),
        *[pytest.param("ddp", 2, name, marks=pytest.mark.matrix) for name in ("numbers", "a number", "nothing")],
        pytest.param("fsdp", 2, "a tensor", marks=pytest.mark.matrix),
    ],
)
def test_extra_state_survives_save_model(strategy, world_size, name, tmp_path):
    run_ranks(save_and_load, world_size, str(tmp_path), strategy, name)


SCRIPT = """
import sys, torch
from accelerate import Accelerator, load_checkpoint_in_model
from tests.reports.test_extra_state import build
import accelerate
accelerator, folder = Accelerator(cpu=True), sys.argv[1]
accelerator.save_model(accelerator.prepare(build({"scale": 3})), folder, safe_serialization=False)
model = build()
load_checkpoint_in_model(model, folder)
assert model[0].extra == model[1][0].extra == {"scale": 3}
print("loaded")
"""


@pytest.mark.slow
def test_extra_state_survives_save_model_with_accelerate_imports(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "headway",
        "launch",
        "--as",
        "accelerate",
        "--cpu",
        str(tmp_path / "script.py"),
        str(tmp_path),
    ]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.returncode == 0, result.stderr
    assert "loaded" in result.stdout


def test_saving_extra_state_that_needs_pickle_warns(tmp_path, caplog):
    """Weight files are read without executing code, so the saved file cannot be loaded by default."""
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(build(pytest.Session)), tmp_path, safe_serialization=False)
    assert "0._extra_state" in caplog.text
    assert "weights_only=False" in caplog.text
    with pytest.raises(CheckpointError, match="refuses this file"):
        load_checkpoint_in_model(build(), tmp_path)


def test_unsupported_object_is_named_in_the_error(tmp_path):
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"'0.bias' is a int"):
        load_checkpoint_in_model(build(), tmp_path)


def test_strict_load_requires_extra_state_like_torch(tmp_path):
    weights = {name: value for name, value in build().state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(build(), tmp_path)
    with pytest.raises(CheckpointError, match="_extra_state"):
        load_checkpoint_in_model(build(), tmp_path, strict=True)
