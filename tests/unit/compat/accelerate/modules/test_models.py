"""Test Accelerate's utilities for models: unwrapping, module queries, weight files, and single tensors set by name."""

import sys
import types

import numpy
import pytest
import torch
from accelerate.utils import ao as their_float8
from accelerate.utils import modeling as their_models
from accelerate.utils import other as their_others
from torch import nn

import headway
from headway import init_empty_weights, set_module_tensor_to_device
from headway.compat.accelerate.modules import models
from headway.errors import ConfigError, UnsupportedError
from headway.extras import compiling


def test_model_is_unwrapped():
    model = torch.nn.Linear(1, 1)
    assert models.extract_model_from_parallel(torch.nn.DataParallel(model)) is model
    compiled = torch.compile(model, backend="eager")
    assert compiling.is_compiled_module(compiled)
    assert not compiling.is_compiled_module(model)
    assert models.extract_model_from_parallel(compiled) is compiled
    assert models.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    nested = torch.nn.Sequential(torch.nn.DataParallel(model))
    assert compiling.has_compiled_regions(torch.nn.Sequential(compiled))
    assert models.extract_model_from_parallel(nested, recursive=True)[0] is model


def test_peft_model_is_recognized_without_importing_peft(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert not headway.is_peft_model(torch.nn.Linear(1, 1))
    assert "peft" not in sys.modules
    peft = types.ModuleType("peft")
    peft.PeftModel = type("PeftModel", (torch.nn.Linear,), {})
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert headway.is_peft_model(torch.nn.DataParallel(peft.PeftModel(1, 1)))
    assert not headway.is_peft_model(torch.nn.Linear(1, 1))


def test_modules_are_found_by_class_and_depth():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ReLU())
    assert models.get_module_class_from_name(model, "Linear") is torch.nn.Linear
    assert models.get_module_class_from_name(model, "Conv2d") is None
    assert not models.model_has_dtensor(model)
    names = [name for name, _ in models.get_module_children_bottom_up(model, return_fqns=True)]
    assert names[-1] == ""
    assert names.index("0.0") < names.index("0")
    assert models.get_module_children_bottom_up(model)[-1] is model


def test_objects_are_saved_and_loaded(tmp_path):
    kept = {"weight": torch.ones(2), "array": numpy.arange(3), "floats": numpy.ones(2, dtype=numpy.float32), "n": 3}
    headway.save(kept, tmp_path / "kept.pt")
    found = headway.load(tmp_path / "kept.pt", map_location="cpu")
    assert found["weight"].tolist() == [1, 1]
    assert found["array"].tolist() == [0, 1, 2]
    assert found["floats"].dtype == numpy.float32
    headway.save({"weight": torch.ones(2)}, tmp_path / "kept.safetensors", safe_serialization=True)
    headway.save({"weight": torch.ones(2)}, tmp_path / "each.pt", save_on_each_node=True)
    for name in ("kept.safetensors", "each.pt"):
        assert models.load_state_dict(str(tmp_path / name), {"": "cpu"})["weight"].tolist() == [1, 1]
    with pytest.raises(UnsupportedError, match="over 2 devices; use load_checkpoint_in_model"):
        models.load_state_dict(tmp_path / "each.pt", {"a": "cpu", "b": "meta"})


def test_file_with_code_is_refused(tmp_path):
    torch.save(types.SimpleNamespace(x=1), tmp_path / "code.pt")
    with pytest.raises(Exception, match="weights_only"):
        headway.load(tmp_path / "code.pt")
    assert headway.load(tmp_path / "code.pt", weights_only=False).x == 1


def test_file_names_equal_those_of_save_model(tmp_path):
    accelerator = headway.Accelerator(cpu=True)
    accelerator.save_model(torch.nn.Linear(1, 1), tmp_path)
    assert (tmp_path / headway.SAFE_WEIGHTS_NAME).exists()
    accelerator.save_model(torch.nn.Linear(1, 1), tmp_path / "torch", safe_serialization=False)
    assert (tmp_path / "torch" / headway.WEIGHTS_NAME).exists()


class Scaled(nn.Parameter):
    """Parameter class that can have further attributes."""


def test_moved_parameter_keeps_class_and_requires_grad():
    model = nn.Sequential(nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    assert isinstance(model[0].weight, nn.Parameter)
    assert not model[0].weight.requires_grad
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(1, 2, dtype=torch.float64))
    assert model[0].weight.tolist() == [[1, 1]]
    assert model[0].weight.dtype == torch.float32


def test_parameter_on_the_target_device_stays_the_same_object():
    model = nn.Linear(2, 1)
    weight = model.weight
    set_module_tensor_to_device(model, "weight", "cpu")
    assert model.weight is weight


def test_parameter_on_meta_is_filled_with_a_value():
    with init_empty_weights():
        model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"weight has no memory yet .* give value="):
        set_module_tensor_to_device(model, "weight", "cpu")
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(1, 2), dtype=torch.float16)
    assert model.weight.dtype == torch.float16


def test_parameter_class_and_attributes_are_kept():
    model = nn.Linear(2, 1)
    model.weight = Scaled(torch.ones(1, 2))
    model.weight.scale = 3
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.zeros(1, 2), fp16_statistics=torch.ones(1))
    assert type(model.weight) is Scaled
    assert model.weight.scale == 3
    assert model.weight.SCB.item() == 1


def test_buffers_are_set():
    model = nn.Sequential(nn.BatchNorm1d(2))
    set_module_tensor_to_device(model, "0.running_mean", "cpu", value=torch.full((2,), 5.0))
    assert model[0].running_mean.tolist() == [5, 5]
    set_module_tensor_to_device(model, "0.num_batches_tracked", "cpu", value=torch.tensor(7), dtype=torch.float16)
    assert model[0].num_batches_tracked.dtype == torch.int64


def test_tied_value_on_the_device_is_reused():
    model, value = nn.Linear(2, 1), torch.ones(1, 2)
    there = nn.Parameter(value.clone())
    known = {value.data_ptr(): {torch.device("cpu"): there}}
    set_module_tensor_to_device(model, "weight", "cpu", value=value, tied_params_map=known)
    assert model.weight is there


def test_unknown_name_and_wrong_shape_are_refused():
    model = nn.Sequential(nn.Linear(2, 1))
    for name in ("0.wait", "1.weight", "weight"):
        with pytest.raises(ConfigError, match="has no"):
            set_module_tensor_to_device(model, name, "cpu")
    with pytest.raises(ConfigError, match=r"has the shape \(1, 2\), but value has \(2, 2\)"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
        self.mixed = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Linear(32, 5)])
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.blocks[1].register_buffer("kept", torch.zeros(1), persistent=False)


def test_module_queries_equal_accelerates():
    net = Net()
    for options in ({}, {"recurse": True}, {"recurse": True, "fqns": True}):
        one, other = (kind.get_non_persistent_buffers(net, **options) for kind in (their_models, models))
        assert other == one
    names = [name for name, _ in net.named_modules()]
    assert models.get_module_leaves(names) == their_models.get_module_leaves(names)
    for part in net.modules():
        assert models.is_repeated_blocks(part) == their_others.is_repeated_blocks(part)
        assert models.has_repeated_blocks(part) == their_others.has_repeated_blocks(part)
    devices = [torch.device(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1", "meta")]
    for first in devices:
        for second in devices:
            one, other = (kind.check_device_same(first, second) for kind in (their_models, models))
            assert other == one, (first, second)


def test_linear_layers_for_float8_equal_accelerates():
    net = Net()
    ends = models.find_first_last_linear_layers(net)
    assert ends == their_float8.find_first_last_linear_layers(net) == ("first", "mixed.1")
    assert models.find_first_last_linear_layers(torch.nn.ReLU()) == (None, None)
    for name, part in net.named_modules():
        one, other = (kind.filter_linear_layers(part, name, ends) for kind in (their_float8, models))
        assert other == one
        one, other = (kind.filter_first_and_last_linear_layers(part, name) for kind in (their_float8, models))
        assert other == one
    assert models.has_ao_layers(net) is False
