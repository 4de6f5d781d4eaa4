"""Test that the private names of torch that `headway.core.weights` uses exist and work."""

import torch
from torch import nn

from headway.core.weights import _torch


def test_compiled_module_contains_the_module_under_the_known_name():
    module = nn.Linear(2, 2)
    compiled = torch.compile(module)
    assert getattr(compiled, _torch.COMPILED_MODULE) is module
    assert {name.partition(".")[0] for name in compiled.state_dict()} == {_torch.COMPILED_MODULE}


def test_load_hooks_are_listed_and_called():
    module, seen = nn.Linear(2, 2), []
    _torch.add_load_hook(module, lambda state, prefix, *_: seen.append(prefix))
    assert len(_torch.list_load_hooks(module)) == 1
    module.load_state_dict(module.state_dict())
    assert seen == [""]
