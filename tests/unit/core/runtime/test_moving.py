"""Test that a moved module keeps its parameter objects. tests/accelerator tests devices that packages register."""

import torch
from torch import nn

from headway.core.runtime import moving
from headway.core.runtime.moving import move_module


def test_setting_of_torch_is_restored_and_tied_parameters_stay_tied(monkeypatch):
    # Simulate a device that torch's list lacks: no parameter can get new data in place.
    monkeypatch.setattr(moving, "_can_replace_data", lambda old, new: False)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move_module(model, torch.device("cpu"))
    assert not torch.__future__.get_swap_module_params_on_conversion()
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert model[1].weight is model[0].weight
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_module_without_parameters_is_moved():
    move_module(nn.ReLU(), torch.device("cpu"))
    with moving._swap_contents(True):
        assert torch.__future__.get_swap_module_params_on_conversion()
