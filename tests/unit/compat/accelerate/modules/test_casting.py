"""Test layer-wise casting: gradients, stored weights, failing forwards, and patterns of skipped modules."""

import pytest
import torch
from torch import nn

from headway.compat.accelerate.modules.casting import (
    LayerwiseCastingHook,
    attach_layerwise_casting_hooks,
    get_fsdp2_grad_scaler,
)
from headway.compat.accelerate.modules.hooks import add_hook_to_module, remove_hook_from_module

FLOAT8, HALF = torch.float8_e4m3fn, torch.bfloat16


def test_gradients_reach_the_stored_weights():
    layer = nn.Linear(4, 2)
    attach_layerwise_casting_hooks(layer, HALF, torch.float32)
    layer(torch.ones(3, 4)).sum().backward()
    assert layer.weight.dtype == HALF
    assert torch.equal(layer.weight.grad, torch.full((2, 4), 3.0, dtype=HALF))


def test_gradients_pass_through_frozen_weights():
    layer = nn.Linear(4, 2).requires_grad_(False)
    attach_layerwise_casting_hooks(layer, FLOAT8, torch.float32)
    inputs = torch.ones(3, 4, requires_grad=True)
    layer(inputs).sum().backward()
    assert torch.equal(inputs.grad[0], layer.weight.float().sum(0))


def test_stored_weights_stay_the_same_objects():
    layer = nn.Linear(4, 2).requires_grad_(False)
    attach_layerwise_casting_hooks(layer, FLOAT8, HALF)
    before = (layer.weight, layer.weight.data_ptr())
    layer(torch.ones(3, 4, dtype=HALF))
    assert layer.weight is before[0]
    assert layer.weight.data_ptr() == before[1]


def test_error_in_the_forward_restores_the_stored_weights():
    layer = nn.Linear(4, 2).requires_grad_(False)
    attach_layerwise_casting_hooks(layer, FLOAT8, HALF)
    with pytest.raises(RuntimeError):
        layer(torch.ones(3, 5, dtype=HALF))
    assert layer.weight.dtype == FLOAT8


def test_values_written_in_a_forward_are_kept():
    class Counting(nn.Linear):
        def forward(self, inputs):
            with torch.no_grad():
                self.bias += 1
            return super().forward(inputs)

    layer = Counting(4, 2).requires_grad_(False)
    nn.init.zeros_(layer.bias)
    attach_layerwise_casting_hooks(layer, HALF, torch.float32)
    layer(torch.ones(3, 4))
    assert torch.equal(layer.bias, torch.ones(2, dtype=HALF))


def test_single_pattern_is_not_a_list_of_letters():
    model = nn.ModuleDict({"keep": nn.Linear(2, 2), "cast": nn.Linear(2, 2)})
    attach_layerwise_casting_hooks(model, HALF, torch.float32, skip_modules_pattern="^keep$")
    assert model["keep"].weight.dtype == torch.float32
    assert model["cast"].weight.dtype == HALF


def test_casting_hook_stores_a_whole_block_in_half_precision():
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    add_hook_to_module(block, LayerwiseCastingHook(HALF, torch.float32, False))
    assert {each.dtype for each in block.parameters()} == {HALF}
    assert block(torch.ones(2, 4)).dtype == torch.float32
    remove_hook_from_module(block)
    assert {each.dtype for each in block.parameters()} == {HALF}


def test_grad_scaler_of_fsdp2_is_torchs():
    assert isinstance(get_fsdp2_grad_scaler(enabled=False), torch.amp.GradScaler)
