"""dispatch_model and its kin under Accelerate's name: the hooks that modules show, and what libraries do with them."""

import sys

import pytest
import torch
from torch import nn

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


def hooks_of(model):
    return {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def test_an_offloaded_state_dict_has_the_weights_of_root_and_inner_modules(model):
    weights = {"weight": None, "bias": None, "other": 1}
    assert dispatched.get_state_dict_from_offload(model[0], "weight", weights) is weights
    assert torch.equal(weights["weight"], model[0].weight)
    inner = dispatched.get_state_dict_from_offload(model[1], "1.0.weight", {"1.0.weight": None, "weight": None})
    assert inner == {"1.0.weight": None, "weight": None}  # the name is that of the submodule's own parameter
    inner = dispatched.get_state_dict_from_offload(model[1][0], "1.0.weight", {"1.0.weight": None, "weight": None})
    assert torch.equal(inner["1.0.weight"], model[1][0].weight)
    assert inner["weight"] is None


def test_modules_show_where_they_run_and_what_is_offloaded(model, inputs, tmp_path):
    expected = model(inputs)
    placed = dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    assert placed is model
    assert model.hf_device_map == MAP
    hooks = hooks_of(model)
    assert {name: (type(hook), hook.offload) for name, hook in hooks.items()} == {
        "": (AlignDevicesHook, False),
        "0": (AlignDevicesHook, False),
        "1": (AlignDevicesHook, False),
        "1.0": (AlignDevicesHook, True),
        "2": (AlignDevicesHook, False),
    }
    assert torch.equal(hooks["1.0"].weights_map["weight"], model[1][0].weight)
    assert torch.equal(model(inputs), expected)


def test_one_place_needs_no_hooks(model):
    dispatched.dispatch_model(model, {"": "cpu"})
    assert hooks_of(model) == {}
    assert model.hf_device_map == {"": "cpu"}


def test_forced_hooks(model, inputs):
    dispatched.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert "" in hooks_of(model)


def test_removing_the_hooks_takes_off_what_runs_the_model(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    assert EXECUTION in vars(model)
    remove_hook_from_module(model, recurse=True)
    assert hooks_of(model) == {}
    assert EXECUTION not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(inputs), expected)


def test_a_model_around_it_is_placed_anew(model, inputs, tmp_path):
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    expected = model(inputs)
    around = nn.Sequential(model)
    dispatched.dispatch_model(around, {"0": "cpu"})
    assert hooks_of(around) == {}
    assert EXECUTION not in vars(model)
    assert torch.equal(around(inputs), expected)


def test_a_hook_of_the_users_stays_and_is_called(model, inputs, tmp_path):
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


def test_a_hook_beside_a_shown_one(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    add_hook_to_module(model[1][0], ModelHook(), append=True)
    for _ in range(2):
        assert torch.equal(model(inputs), expected)


def test_a_shown_hook_given_to_another_module(model, inputs, tmp_path):
    dispatched.dispatch_model(model, MAP, offload_dir=tmp_path)
    larger = nn.Linear(4, 9)
    expected = larger(inputs)
    add_hook_to_module(larger, model[1][0]._hf_hook)
    assert torch.equal(larger(inputs), expected)


def test_offloading_to_host_memory_shows_no_map(model, inputs):
    expected = model(inputs)
    dispatched.cpu_offload(model, torch.device("cpu:0"))
    hooks = hooks_of(model)
    assert set(hooks) == {"", "0", "1.0", "2"}
    assert hooks["0"].offload
    assert hooks["0"].execution_device == torch.device("cpu")
    assert hooks[""].io_same_device
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(inputs), expected)


def test_offloading_to_disk_shows_no_map(model, inputs, tmp_path):
    expected = model(inputs)
    dispatched.disk_offload(model, tmp_path)
    assert set(hooks_of(model)) == {"", "0", "1.0", "2"}
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(inputs), expected)


def test_loading_shows_hooks_too(model, inputs, tmp_path):
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    expected = model(inputs)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    dispatched.load_checkpoint_and_dispatch(empty, tmp_path / "weights.bin", MAP, offload_folder=tmp_path / "off")
    assert set(hooks_of(empty)) == {"", "0", "1", "1.0", "2"}
    assert torch.equal(empty(inputs), expected)


def test_a_map_that_leaves_something_out(model, inputs, tmp_path, monkeypatch):
    left_out = {"0": "cpu", "1": "disk"}
    monkeypatch.delitem(sys.modules, "accelerate.big_modeling", raising=False)  # the real one, imported by another test
    with pytest.raises(errors.DeviceMapError, match=r"parameters: 2.weight"):
        dispatched.dispatch_model(model, left_out, offload_dir=tmp_path)
    # What transformers does for models with parameters that shall have no place: it puts an empty check there.
    module = type(sys)("accelerate.big_modeling")
    module.check_device_map = lambda model, device_map: None
    monkeypatch.setitem(sys.modules, "accelerate.big_modeling", module)
    expected = model(inputs)
    dispatched.dispatch_model(model, left_out, offload_dir=tmp_path)
    assert model.hf_device_map == left_out
    assert torch.equal(model(inputs), expected)
