"""A moved module keeps its parameters the same objects; on devices that packages register, tests/accelerator shows it."""

import torch
from torch import nn

from headway.core.runtime import moving
from headway.core.runtime.moving import move_module


def test_the_setting_of_torch_is_put_back_and_tied_parameters_stay_tied(monkeypatch):
    # In place of a device that torch's list lacks: nothing may be given new data in place.
    monkeypatch.setattr(moving, "_can_take_data_of", lambda old, new: False)
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


def test_a_module_without_parameters_moves():
    move_module(nn.ReLU(), torch.device("cpu"))
    with moving._swap_contents(True):
        assert torch.__future__.get_swap_module_params_on_conversion()
