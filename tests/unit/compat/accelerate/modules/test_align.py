"""Test hooks that bring weights to the device of a module: Accelerate's names and meanings, and no leftovers."""

import importlib.util
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from headway import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    has_offloaded_params,
    init_empty_weights,
    offload_state_dict,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from headway.compat.accelerate.modules import align
from headway.offload.stream import DeviceStream
from tests.unit.offload.placement.models import Chain, build_model

needs_peer = pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="accelerate is not installed")


@pytest.fixture
def copies(monkeypatch):
    """Copy all weights, as if the CPU were another device, and return the list of copied tensors."""
    made = []
    original = align._place_copies

    def place_copies_elsewhere(places, homes, device, tied=None):
        class Elsewhere:
            """Device that equals no tensor's device, but to which tensors can be copied."""

        def copy_tensor(home, _):
            made.append(home)
            if home.requires_grad and torch.is_grad_enabled():
                return home.clone()
            copy = home.detach().clone()
            return nn.Parameter(copy, requires_grad=home.requires_grad) if isinstance(home, nn.Parameter) else copy

        monkeypatch.setattr(align, "_copy_tensor", copy_tensor)
        return original(places, homes, Elsewhere(), tied)

    monkeypatch.setattr(align, "_place_copies", place_copies_elsewhere)
    return made


def build_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


class Lazy(Mapping):
    """Mapping that creates each value on request and records the requested names."""

    def __init__(self, state):
        self.state, self.asked = state, []

    def __getitem__(self, name):
        self.asked.append(name)
        return self.state[name].clone()

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


def test_offloaded_weights_are_on_the_device_only_during_the_forward(copies):
    model = build_network()
    x = torch.randn(6, 3)
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True)
    weight = model[0].weight
    assert [has_offloaded_params(module) for module in model] == [True, True, True]
    assert not has_offloaded_params(model)
    for _ in range(2):
        copies.clear()
        assert torch.equal(model(x), expected) or model[1].training
        assert any(home is weight for home in copies)
        assert model[0].weight is weight
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") or module._forward_pre_hooks for module in model.modules())
    assert model[0].weight is weight


def test_error_in_the_forward_restores_the_weights(copies):
    model = build_network()
    attach_align_device_hook(model, "cpu", offload=True)
    weight = model[0].weight
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 2))
    assert model[0].weight is weight
    model(torch.randn(2, 3))
    assert model[0].weight is weight


def test_gradients_reach_the_offloaded_weights(copies):
    model, other = build_network(), build_network()
    attach_align_device_hook(model, "cpu", offload=True)
    x = torch.randn(6, 3)
    for each in (model, other):
        each(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), other.parameters()):
        assert torch.equal(parameter.grad, expected.grad)


def test_values_written_in_a_forward_are_copied_back(copies):
    """Check the running statistics of a batch norm with offloaded buffers."""
    model, other = build_network(), build_network()
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    x = torch.randn(6, 3)
    with torch.no_grad():
        model(x), other(x)
    assert torch.equal(model[1].running_mean, other[1].running_mean)
    assert model[1].num_batches_tracked == 1


def test_weights_map_is_read_at_each_forward(copies):
    model = build_network().eval()
    state = Lazy(model.state_dict())
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = model(x)
        attach_align_device_hook(model, "cpu", offload=True, weights_map=state)
        assert model[0].weight.is_meta
        assert not model[1].running_mean.is_meta
        assert torch.equal(model(x), expected)
        assert state.asked.count("0.weight") == 1
        assert model[0].weight.is_meta
        with align_module_device(model[0]):
            assert torch.equal(model[0].weight, state.state["0.weight"])
        remove_hook_from_submodules(model)
    assert torch.equal(model[0].weight, state.state["0.weight"])


def test_tied_weights_are_copied_once(copies):
    model = Chain(1).eval()
    hook = AlignDevicesHook("cpu", offload=True, place_submodules=True)
    add_hook_to_module(model, hook)
    hook.pre_forward(model)
    assert model.head.weight is model.embedding.weight
    assert sum(home.shape == (100, 16) for home in copies) == 1
    hook.pre_forward(model)  # a nested call
    assert sum(home.shape == (100, 16) for home in copies) == 1
    hook.post_forward(model, None)
    hook.post_forward(model, None)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight is copies[[home.shape for home in copies].index((100, 16))]


def test_inputs_move_except_skipped_keys_and_outputs_return():
    seen = []

    class Look(nn.Module):
        """Record the device types of the inputs."""

        def forward(self, x, cache=None, mask=None):
            seen.append((x.device.type, cache.device.type, mask.device.type))
            return x

    module = add_hook_to_module(Look(), AlignDevicesHook("meta", io_same_device=False, skip_keys="cache"))
    ones = torch.ones(2)
    assert module(ones, cache=ones, mask=ones).is_meta
    assert seen == [("meta", "cpu", "meta")]
    hook = AlignDevicesHook("cpu", io_same_device=True)
    add_hook_to_module(module, hook)
    module(ones, cache=ones, mask=ones)
    assert hook.input_device == torch.device("cpu")
    assert "io_same_device=True" in repr(hook)
    assert module(ones, cache=ones, mask=ones).device.type == "cpu"


def test_without_offload_weights_move_once():
    model = Chain(1)
    add_hook_to_module(model, AlignDevicesHook("meta", place_submodules=True))
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    untouched = build_network()
    add_hook_to_module(untouched, AlignDevicesHook(None, place_submodules=True))
    assert untouched[0].weight.device.type == "cpu"


def test_align_module_device_lasts_for_the_block():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[0].weight
    with align_module_device(model[0], "meta"):
        assert model[0].weight.is_meta
        assert isinstance(model[0].weight, nn.Parameter)
        assert not model[1].weight.is_meta
    assert model[0].weight is weight
    with align_module_device(model[0]):  # no other device is known
        assert model[0].weight is weight
    with pytest.raises(KeyError, match="in the block"), align_module_device(model[0], "meta"):
        raise KeyError("in the block")
    assert model[0].weight is weight


def test_values_written_in_the_block_are_kept(copies):
    model = build_network()
    attach_align_device_hook(model, "cpu", offload=True)
    home = model[0].weight
    with align_module_device(model[0]), torch.no_grad():
        assert model[0].weight is not home
        model[0].weight.fill_(2.0)
        assert not torch.equal(home, model[0].weight)
    assert model[0].weight is home
    assert home.unique().tolist() == [2.0]


def test_streamed_model_has_offloaded_params_and_aligns():
    """Copies within host memory stand for a device."""
    from headway.core.weights.locations import TensorLocation
    from headway.offload.execution import _LoadWeights

    module = nn.Linear(2, 2)
    stream = DeviceStream([[TensorLocation(module, "weight", True)]], torch.device("cpu"), 1, transport=object())
    module.register_forward_pre_hook(_LoadWeights(stream, 0))
    assert has_offloaded_params(module)
    with align_module_device(module):
        assert module.weight.device == stream.device


def test_preloaded_classes_shared_modules_and_nested_names_get_hooks():
    model = Chain(2)
    model.again = model.blocks[0]
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Block"])
    hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert set(hooks) == {
        "embedding",
        "blocks.0",
        "blocks.1",
        "head",
    }  # one hook for the shared module, and none inside the blocks
    assert hooks["blocks.0"].place_submodules
    attach_align_device_hook(model.head, "cpu")
    assert isinstance(model.head._hf_hook, SequentialHook)  # appended
    other = Chain(1)
    attach_execution_device_hook(other, "cpu", preload_module_classes=["Block"])
    assert [n for n, m in other.named_modules() if hasattr(m, "_hf_hook")] == [
        "",
        "embedding",
        "blocks",
        "blocks.0",
        "head",
    ]
    hook = other._hf_hook
    attach_execution_device_hook(other, "cpu")
    assert other._hf_hook is hook


@needs_peer
@pytest.mark.parametrize("offload", [False, True, {"model.embed_tokens": True, "model.layers": False, "lm_head": True}])
def test_blocks_get_the_same_hooks_as_from_accelerate(offload):
    from accelerate.hooks import attach_align_device_hook_on_blocks as their_attach

    found = []
    for attach in (attach_align_device_hook_on_blocks, their_attach):
        model = build_model("llama").eval()
        devices = dict.fromkeys(offload, "cpu") if isinstance(offload, dict) else "cpu"
        attach(model, devices, offload, weights_map=model.state_dict())
        hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
        found.append({n: (h.offload, h.io_same_device, h.place_submodules) for n, h in hooks.items()})
        ids = torch.arange(8)[None]
        if attach is attach_align_device_hook_on_blocks:
            logits = model(ids).logits
            remove_hook_from_module(model, recurse=True)
            assert torch.equal(model(ids).logits, logits)
    assert found[0] == found[1]


def test_meta_model_runs_from_an_offload_folder(tmp_path):
    torch.manual_seed(0)
    model = build_model("llama").eval()
    offload_state_dict(tmp_path, model.state_dict())
    with init_empty_weights(include_buffers=False):
        empty = build_model("llama").eval()
    attach_align_device_hook(empty, "cpu", offload=True, weights_map=OffloadedWeightsLoader(save_folder=tmp_path))
    ids = torch.arange(8)[None]
    assert torch.equal(empty(ids).logits, model(ids).logits)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in empty.state_dict().items())
