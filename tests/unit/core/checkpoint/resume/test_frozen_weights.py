"""Test checkpoints that hold digests of frozen weights: changes of the weights are found, also those through `.data`."""

import pytest
import torch

from headway.errors import CheckpointError
from tests.unit.core.checkpoint.resume.test_methods import _run_in_empty_folder, build, train_epoch  # noqa: F401  (the fixture moves to a folder of its own)


class AdaptedModel(torch.nn.Module):
    """Linear model whose `base` is frozen."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(3, 3000).requires_grad_(False)
        self.adapter = torch.nn.Linear(3000, 1)

    def forward(self, x):
        return self.adapter(self.base(x))


def build_adapted():
    torch.manual_seed(0)
    return build(AdaptedModel(), save_frozen=False)


def in_place(weight):
    weight.add_(1e-3)


def through_data(weight):
    weight.data.add_(1e-3)


def new_data(weight):
    weight.data = weight.data + 1e-3


@pytest.mark.parametrize("change", [in_place, through_data, new_data])
def test_changed_frozen_weights_are_reported_at_the_save_and_refused_at_the_load(caplog, change):
    accelerator, model, *objects = build_adapted()
    accelerator.save_state()
    train_epoch(accelerator, model, *objects, num=1)
    accelerator.save_state()
    assert "frozen weights have changed" not in caplog.text
    change(model.base.weight)
    accelerator.save_state()
    assert (
        "1 frozen weights have changed since this run first saved or loaded them (model/0/base.weight, for"
        in caplog.text
    )
    again, *_ = build_adapted()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 differ from this model's weights or are missing: model/0/base\.weight"
    ):
        again.resume("latest")
    assert again.resume("run/checkpoints/checkpoint_1").about["num_updates"] == 1


def test_digests_are_computed_once(monkeypatch):
    accelerator, *_ = build_adapted()
    accelerator.save_state()
    # A second computation would raise ZeroDivisionError.
    monkeypatch.setattr("headway.core.checkpoint.resume.frozen_weights._compute_term", lambda value: 1 / 0)
    accelerator.save_state()


class QuantizedModel(torch.nn.Module):
    """Small trainable layers beside a frozen quantized base."""

    def __init__(self, kind, scale=1.0):
        super().__init__()
        layers = pytest.importorskip("bitsandbytes").nn
        if kind == "int8":
            self.base = layers.Linear8bitLt(64, 64, has_fp16_weights=False)
        else:
            self.base = layers.Linear4bit(64, 64, quant_type=kind)
        self.base.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(3, 64), torch.nn.Linear(64, 1)
        with torch.no_grad():
            self.base.weight.data.mul_(scale)
        self.to("cpu")  # quantizes the base

    def forward(self, x):
        hidden = self.down(x)
        return self.up(torch.tanh(hidden + self.base(hidden)))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_training_beside_a_quantized_base_resumes_exactly(kind):
    torch.manual_seed(0)
    accelerator, model, *objects = build(QuantizedModel(kind), save_frozen=False)
    train_epoch(accelerator, model, *objects, num=2)
    accelerator.save_state()
    train_epoch(accelerator, model, *objects, num=2)
    torch.manual_seed(0)
    again, model_again, *objects_again = build(QuantizedModel(kind), save_frozen=False)
    with torch.no_grad():
        for parameter in (*model_again.down.parameters(), *model_again.up.parameters()):
            parameter.zero_()
    again.resume("latest")
    for _ in again.epochs(2):
        train_epoch(again, model_again, *objects_again, num=2)
    for (name, value), other in zip(model.state_dict().items(), model_again.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_base_with_other_scales_is_refused(kind):
    """The codes are the same: only the scales differ."""
    torch.manual_seed(0)
    accelerator, *_ = build(QuantizedModel(kind), save_frozen=False)
    accelerator.save_state()
    torch.manual_seed(0)
    again, *_ = build(QuantizedModel(kind, scale=2.0), save_frozen=False)
    with pytest.raises(
        CheckpointError, match=r"differ from this model's weights or are missing: model/0/base\.weight\."
    ):
        again.resume("latest")
