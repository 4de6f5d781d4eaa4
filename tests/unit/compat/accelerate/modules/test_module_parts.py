"""What scripts ask of a model's parts and of the environment: the real package answers alike."""

import os

import pytest
import torch
from accelerate.utils import ao as their_float8
from accelerate.utils import environment as their_environment
from accelerate.utils import modeling as their_models
from accelerate.utils import operations as their_operations
from accelerate.utils import other as their_others

import headway
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.data import batches
from headway.compat.accelerate.launching import available, environment
from headway.compat.accelerate.modules import casting, dispatched, models


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
        self.mixed = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Linear(32, 5)])
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.blocks[1].register_buffer("kept", torch.zeros(1), persistent=False)


def test_parts():
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


def test_layers_for_float8():
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


def test_weights_of_an_offloaded_model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    headway.cpu_offload(net, torch.device("cpu"))
    found = dispatched.get_state_dict_offloaded_model(net)
    assert set(found) == set(before)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_variables(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "old")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    environment.enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "True")
    environment.disable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "False")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    given = {"A": "1", "B": "<x", "C": "", "D": "two words", "E": "2"}
    assert environment.convert_dict_to_env_variables(given) == ["A=1\n", "E=2\n"]
    assert their_environment.convert_dict_to_env_variables({"A": "1"}) == ["A=1\n"]


class State:
    distributed_type = DistributedType.DEEPSPEED
    deepspeed_plugin = "the plugin"


def test_the_plugin_of_a_state():
    assert environment.get_active_deepspeed_plugin(State()) == "the plugin"
    made = headway.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="not DEEPSPEED"):
        environment.get_active_deepspeed_plugin(made.state)


def test_rows_where_there_may_be_none():
    for data in ({"x": torch.ones(3, 2)}, [], "text", [torch.ones(2)]):
        assert batches.ignorant_find_batch_size(data) == their_operations.ignorant_find_batch_size(data)


def test_gpus_and_scalers(monkeypatch):
    monkeypatch.setattr(available, "_ask", lambda field: ["8.9"])
    assert available.check_cuda_fp8_capability() is True
    monkeypatch.setattr(available, "_ask", lambda field: ["8.6", "9.0"])
    assert available.check_cuda_fp8_capability() is False
    assert isinstance(casting.get_fsdp2_grad_scaler(enabled=False), torch.amp.GradScaler)
