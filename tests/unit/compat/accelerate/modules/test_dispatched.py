"""Test `dispatch_model`, `cpu_offload` and `disk_offload` of Accelerate: the hooks on modules, and their removal."""

import sys

import pytest
import torch
from torch import nn

import headway
from headway import errors
from headway.compat.accelerate.modules import dispatched
from headway.compat.accelerate.modules.align import AlignDevicesHook
from headway.compat.accelerate.modules.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from headway.core.training.prepared.dispatched import EXECUTION


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


@pytest.fixture
def inputs():
    return torch.arange(8.0).view(2, 4)


MAP = {"0": "cpu", "1": "disk", "2": "cpu"}


def get_hooks(model):
    return {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def test_state_dict_from_offload_has_weights_of_root_and_inner_modules(model):
    weights = {"weight": None, "bias": None, "other": 1}
    assert dispatched.get_state_dict_from_offload(model[0], "weight", weights) is weights
    assert torch.equal(weights["weight"], model[0].weight)
    inner = dispatched.get_state_dict_from_offload(model[1], "1.0.weight", {"1.0.weight": None, "weight": None})
    assert inner == {"1.0.weight": None, "weight": None}  # the module must be the one that has the parameter
    inner = dispatched.get_state_dict_from_offload(model[1][0], "1.0.weight", {"1.0.weight": None, "weight": None})
    assert torch.equal(inner["1.0.weight"], model[1][0].weight)
    assert inner["weight"] is None


def test_hooks_show_where_modules_run_and_what_is_offloaded(model, inputs, tmp_path):
    expected = model(inputs)
    placed = dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    assert placed is model
    assert model.hf_device_map == MAP
    hooks = get_hooks(model)
    assert {name: (type(hook), hook.offload) for name, hook in hooks.items()} == {
        "": (AlignDevicesHook, False),
        "0": (AlignDevicesHook, False),
        "1": (AlignDevicesHook, False),
        "1.0": (AlignDevicesHook, True),
        "2": (AlignDevicesHook, False),
    }
    assert torch.equal(hooks["1.0"].weights_map["weight"], model[1][0].weight)
    assert torch.equal(model(inputs), expected)


def test_single_device_needs_no_hooks(model):
    dispatched.dispatch_model(model, {"": "cpu"})
    assert get_hooks(model) == {}
    assert model.hf_device_map == {"": "cpu"}


def test_force_hooks_adds_hooks(model, inputs):
    dispatched.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert "" in get_hooks(model)


def test_removing_the_hooks_removes_the_execution(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    assert EXECUTION in vars(model)
    remove_hook_from_module(model, recurse=True)
    assert get_hooks(model) == {}
    assert EXECUTION not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(inputs), expected)


def test_outer_model_can_be_dispatched_anew(model, inputs, tmp_path):
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    expected = model(inputs)
    around = nn.Sequential(model)
    dispatched.dispatch_model(around, {"0": "cpu"})
    assert get_hooks(around) == {}
    assert EXECUTION not in vars(model)
    assert torch.equal(around(inputs), expected)


def test_users_hook_stays_and_is_called(model, inputs, tmp_path):
    class Counting(ModelHook):
        count = 0

        def pre_forward(self, module, *args, **kwargs):
            self.count += 1
            return args, kwargs

    counting = Counting()
    add_hook_to_module(model[1][0], counting)
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    assert isinstance(model[1][0]._hf_hook, SequentialHook)
    model(inputs)
    assert counting.count == 1


def test_hook_can_be_appended_to_an_existing_one(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    add_hook_to_module(model[1][0], ModelHook(), append=True)
    for _ in range(2):
        assert torch.equal(model(inputs), expected)


def test_hook_of_a_module_works_on_another_module(model, inputs, tmp_path):
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    larger = nn.Linear(4, 9)
    expected = larger(inputs)
    add_hook_to_module(larger, model[1][0]._hf_hook)
    assert torch.equal(larger(inputs), expected)


def test_cpu_offload_sets_no_device_map(model, inputs):
    expected = model(inputs)
    dispatched.cpu_offload(model, torch.device("cpu:0"))
    hooks = get_hooks(model)
    assert set(hooks) == {"", "0", "1.0", "2"}
    assert hooks["0"].offload
    assert hooks["0"].execution_device == torch.device("cpu")
    assert hooks[""].io_same_device
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(inputs), expected)


def test_disk_offload_sets_no_device_map(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.disk_offload(model, tmp_path)
    assert set(get_hooks(model)) == {"", "0", "1.0", "2"}
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(inputs), expected)


def test_load_checkpoint_and_dispatch_adds_hooks(model, inputs, tmp_path):
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    expected = model(inputs)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    dispatched.load_checkpoint_and_dispatch(empty, tmp_path / "weights.bin", MAP, offload_folder=tmp_path / "off")
    assert set(get_hooks(empty)) == {"", "0", "1", "1.0", "2"}
    assert torch.equal(empty(inputs), expected)


def test_map_without_some_modules_needs_a_disabled_check(model, inputs, tmp_path, monkeypatch):
    left_out = {"0": "cpu", "1": "disk"}
    monkeypatch.delitem(
        sys.modules, "accelerate.big_modeling", raising=False
    )  # another test may have imported the real module
    with pytest.raises(errors.DeviceMapError, match=r"parameters: 2.weight"):
        dispatched.dispatch_model(model, left_out, offload_dir=tmp_path)
    # transformers replaces the check by an empty function for models with parameters that need no device.
    module = type(sys)("accelerate.big_modeling")
    module.check_device_map = lambda model, device_map: None
    monkeypatch.setitem(sys.modules, "accelerate.big_modeling", module)
    expected = model(inputs)
    dispatched.dispatch_model(model, left_out, offload_dir=tmp_path)
    assert model.hf_device_map == left_out
    assert torch.equal(model(inputs), expected)


def test_state_dict_of_an_offloaded_model_has_all_values():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    net.scale = torch.nn.Parameter(torch.randn(2))  # of the model itself, not of a submodule
    before = {name: value.clone() for name, value in net.state_dict().items()}
    headway.cpu_offload(net, torch.device("cpu"))
    found = dispatched.get_state_dict_offloaded_model(net)
    assert set(found) == set(before)
    assert all(torch.equal(found[name], before[name]) for name in before)
