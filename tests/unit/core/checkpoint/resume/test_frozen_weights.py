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
    monkeypatch.setattr("headway.core.checkpoint.resume.frozen_weights._compute_term", lambda value: 1 / 0)
    accelerator.save_state()
