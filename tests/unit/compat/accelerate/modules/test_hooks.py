"""Test module hooks: order, replacement, removal, errors, and models that take turns on a device."""

import pytest
import torch
from torch import nn

from headway import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    cpu_offload_with_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Add(ModelHook):
    """Hook that adds a number before the forward and another one after it."""

    def __init__(self, before, after=0):
        self.before, self.after, self.is_on = before, after, False

    def init_hook(self, module):
        self.is_on = True
        return module

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module, output):
        return None if output is None else output + self.after

    def detach_hook(self, module):
        self.is_on = False
        return module


class Double(nn.Module):
    def forward(self, x, scale=1):
        return x * 2 * scale


def test_hooks_are_attached_appended_replaced_and_removed():
    module = Double()
    forward = Double.forward
    first, second, third = Add(1), Add(10, 100), Add(5)
    add_hook_to_module(module, first)
    assert module(1, scale=3) == 12
    add_hook_to_module(module, second, append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(1) == 2 * 12 + 100
    assert first.is_on
    assert second.is_on
    add_hook_to_module(module, third)
    assert module(1) == 12
    assert not first.is_on
    assert not second.is_on
    assert type(module).forward is forward
    assert "forward" not in module.__dict__
    remove_hook_from_module(module)
    assert module(1) == 2
    assert not third.is_on
    assert not hasattr(module, "_hf_hook")


def test_no_grad_ends_with_the_forward_even_after_an_error():
    class NoGrad(ModelHook):
        no_grad = True

    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    add_hook_to_module(module[0], NoGrad())
    assert not module(torch.ones(1, 2)).requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert torch.is_grad_enabled()
    remove_hook_from_submodules(module)
    assert module(torch.ones(1, 2)).requires_grad


def test_models_take_turns_on_the_device():
    first, one = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, two = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", one)
    calls = []
    one.offload, original = lambda: calls.append("off"), one.offload
    second(first(torch.ones(1, 2)))
    assert calls == ["off"]
    original()
    one.remove()
    two.remove()
    assert not hasattr(first, "_hf_hook")
    assert not second._forward_pre_hooks
