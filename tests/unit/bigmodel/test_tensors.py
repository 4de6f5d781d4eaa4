"""Setting one tensor of a model."""

import pytest
import torch
from torch import nn

from headway import init_empty_weights, set_module_tensor_to_device
from headway.errors import ConfigError


class Scaled(nn.Parameter):
    pass


def test_a_parameter_moves_and_stays_what_it_is():
    model = nn.Sequential(nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    assert isinstance(model[0].weight, nn.Parameter)
    assert not model[0].weight.requires_grad
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(1, 2, dtype=torch.float64))
    assert model[0].weight.tolist() == [[1, 1]]
    assert model[0].weight.dtype == torch.float32


def test_a_parameter_where_it_is_stays_the_same_object():
    model = nn.Linear(2, 1)
    weight = model.weight
    set_module_tensor_to_device(model, "weight", "cpu")
    assert model.weight is weight


def test_a_model_without_memory_is_filled():
    with init_empty_weights():
        model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"weight has no memory yet .* give value="):
        set_module_tensor_to_device(model, "weight", "cpu")
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(1, 2), dtype=torch.float16)
    assert model.weight.dtype == torch.float16


def test_a_class_and_its_attributes_are_kept():
    model = nn.Linear(2, 1)
    model.weight = Scaled(torch.ones(1, 2))
    model.weight.scale = 3
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.zeros(1, 2), fp16_statistics=torch.ones(1))
    assert type(model.weight) is Scaled
    assert model.weight.scale == 3
    assert model.weight.SCB.item() == 1


def test_buffers():
    model = nn.Sequential(nn.BatchNorm1d(2))
    set_module_tensor_to_device(model, "0.running_mean", "cpu", value=torch.full((2,), 5.0))
    assert model[0].running_mean.tolist() == [5, 5]
    set_module_tensor_to_device(model, "0.num_batches_tracked", "cpu", value=torch.tensor(7), dtype=torch.float16)
    assert model[0].num_batches_tracked.dtype == torch.int64


def test_a_tied_value_that_is_there_already_is_used():
    model, value = nn.Linear(2, 1), torch.ones(1, 2)
    there = nn.Parameter(value.clone())
    known = {value.data_ptr(): {torch.device("cpu"): there}}
    set_module_tensor_to_device(model, "weight", "cpu", value=value, tied_params_map=known)
    assert model.weight is there


def test_what_cannot_be():
    model = nn.Sequential(nn.Linear(2, 1))
    for name in ("0.wait", "1.weight", "weight"):
        with pytest.raises(ConfigError, match="has no"):
            set_module_tensor_to_device(model, name, "cpu")
    with pytest.raises(ConfigError, match=r"has the shape \(1, 2\), but value has \(2, 2\)"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2))
