"""Test `load_weights` from a checkpoint that `save_state` wrote, on one process."""

import copy
import pickle

import pytest
import torch
from torch import nn

from headway import Accelerator, ExponentialMovingAverage, load_checkpoint_in_model
from headway.errors import CheckpointError, ConfigError


class Tagged(nn.Linear):
    """Linear layer with an extra state that contains a tensor."""

    tag: torch.Tensor | None = None

    def get_extra_state(self):
        return {"tag": self.tag, "number": 3}

    def set_extra_state(self, state):
        self.tag = state["tag"]


def save(folder, *models, **averages):
    accelerator = Accelerator(cpu=True)
    prepared = [accelerator.prepare(model) for model in models]
    for name, decay in averages.items():
        accelerator.register_for_checkpointing(ExponentialMovingAverage(prepared[0], decay, name=name))
    accelerator.save_state(folder)


def test_weights_and_extra_states(tmp_path):
    model = Tagged(4, 2)
    model.tag = torch.arange(5)
    save(tmp_path / "saved", model)
    accelerator = Accelerator(cpu=True)
    loaded = accelerator.prepare(Tagged(4, 2).double())
    accelerator.load_weights(loaded, tmp_path / "saved", strict=True)
    assert torch.equal(loaded.weight, model.weight.double())
    assert torch.equal(loaded.tag, torch.arange(5))


def test_head_of_another_shape_is_an_error(tmp_path):
    save(tmp_path / "saved", nn.Linear(4, 2))
    with pytest.raises(
        CheckpointError, match=r"does not fit the model(.|\n)*weight: .* in the checkpoint, .* in the model"
    ):
        Accelerator(cpu=True).load_weights(nn.Linear(4, 3), tmp_path / "saved")


def test_the_model_that_fits_is_chosen(tmp_path):
    models = nn.Linear(4, 2), nn.Linear(4, 3)
    save(tmp_path / "saved", *models)
    accelerator = Accelerator(cpu=True)
    loaded = accelerator.prepare(nn.Linear(4, 3))
    accelerator.load_weights(loaded, tmp_path / "saved")
    assert torch.equal(loaded.weight, models[1].weight)
    with pytest.raises(
        CheckpointError, match=r"contains 2 models, and 0 of them have all parameters.*headway merge .* --model N"
    ):
        accelerator.load_weights(nn.Linear(4, 5), tmp_path / "saved")


def test_average_that_does_not_exist(tmp_path):
    save(tmp_path / "saved", nn.Linear(4, 2), ema=0.9)
    with pytest.raises(ConfigError, match="has 0 averages named 'slow'; its averages: 'ema'"):
        Accelerator(cpu=True).load_weights(nn.Linear(4, 2), tmp_path / "saved", weights="slow")
    torch.save({}, tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="needs a checkpoint that save_state wrote"):
        Accelerator(cpu=True).load_weights(nn.Linear(4, 2), tmp_path / "model.bin", weights="ema")


def test_functions_without_an_accelerator_name_merge(tmp_path):
    save(tmp_path / "saved", nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=r"is a checkpoint that save_state wrote.*load_weights.*headway merge"):
        load_checkpoint_in_model(nn.Linear(4, 2), tmp_path / "saved")


class Base(nn.Module):
    """Model with a part that has pretrained weights."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.base(x))


def test_a_forward_before_the_weights_are_read_warns_once(tmp_path, caplog):
    pretrained = nn.Linear(4, 2)
    save(tmp_path / "saved", pretrained)
    accelerator, model = Accelerator(cpu=True), Base()
    accelerator.load_weights(model.base, tmp_path / "saved")
    copy.deepcopy(model), pickle.dumps(model)
    for _ in range(2):
        model(torch.zeros(1, 4))
    warnings = [each.getMessage() for each in caplog.records if "load_weights" in each.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("Linear ran before the weights of load_weights()")
    assert "prepare_model(model, evaluation_mode=True)" in warnings[0]
    caplog.clear()
    accelerator.prepare(model)
    assert torch.equal(model.base.weight, pretrained.weight)
    model(torch.zeros(1, 4))
    assert not caplog.records
    assert not model.base._forward_pre_hooks


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_no_warning_if_the_weights_are_read(tmp_path, caplog, is_evaluation):
    pretrained = nn.Linear(4, 2)
    save(tmp_path / "saved", pretrained)
    accelerator, model = Accelerator(cpu=True), nn.Linear(4, 2)
    with torch.device("meta"):
        empty = nn.Linear(4, 2)
    accelerator.load_weights(empty, tmp_path / "saved")
    empty(torch.zeros(1, 4, device="meta"))  # computes no values
    accelerator.load_weights(model, tmp_path / "saved")
    accelerator.prepare_model(model, evaluation_mode=is_evaluation)
    model(torch.zeros(1, 4))
    assert torch.equal(model.weight, pretrained.weight)
    assert not [each for each in caplog.records if "load_weights" in each.getMessage()]
