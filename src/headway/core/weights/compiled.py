"""Save and load modules wrapped by `torch.compile(module)` without the wrapper's prefix, and remove the wrappers.

A bare name is a tensor's name in the model without such wrappers.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from headway.core.weights import _torch
from headway.core.weights._torch import COMPILED_MODULE

_LEVEL = f"{COMPILED_MODULE}."
"""Name component that `torch.compile(module)` inserts between a module and its tensors, with the dot after it."""
_LEVEL_PATTERN = re.compile(rf"(?:^|(?<=\.)){re.escape(_LEVEL)}")
"""Pattern of this component at the beginning of a name or after a dot."""


def remove_compiled_levels(name: str) -> str:
    """Return a tensor's name without the components that `torch.compile(module)` adds, at any depth."""
    return _LEVEL_PATTERN.sub("", name) if _LEVEL in name else name


def rename_bare_items(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return (name, value) pairs whose names lack the components that `torch.compile(module)` adds.

    If two values would get equal names, no name is changed.

    Args:
        named: Pairs of (name, value).
    """
    pairs = list(named)
    compiled = [name for name, _ in pairs if _LEVEL in name]
    if not compiled:
        return pairs
    renamed = [(remove_compiled_levels(name), value) for name, value in pairs]
    return renamed if len({name for name, _ in renamed}) == len(pairs) else pairs


def get_bare_submodule(model: nn.Module, path: str) -> nn.Module:
    """Return a submodule without its `torch.compile` wrapper, given its path in the model without such wrappers.

    Raises:
        AttributeError: If there is no such submodule.
    """
    return unwrap_compiled(model.get_submodule(path))  # a wrapper forwards get_submodule() to its module


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile(module)` wrapper. Other modules are returned unchanged."""
    while COMPILED_MODULE in module._modules:
        module = getattr(module, COMPILED_MODULE)
    return module


def remove_wrappers(module: nn.Module) -> nn.Module:
    """Return the module without the wrappers of `torch.compile(module)`, at any depth.

    A module without wrappers is returned unchanged. Otherwise, the result is a copy of the module tree that shares all
    tensors.
    """
    module = unwrap_compiled(module)
    children = {name: None if child is None else remove_wrappers(child) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    # The copy shares the dicts of parameters and buffers. A tensor that is replaced in one module changes in both.
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = children
    return copy


def accept_bare_names(model: nn.Module) -> None:
    """Register hooks so that compiled submodules load state dicts with or without torch.compile's prefix.

    A module that already has such a hook gets no second one.

    Args:
        model: Model with compiled submodules.
    """
    for module in model.modules():
        if COMPILED_MODULE in module._modules and not _has_level_hook(module):
            _torch.add_load_hook(module, _add_missing_level)


def _has_level_hook(module: nn.Module) -> bool:
    """Whether the module already has the hook that adds missing levels to names."""
    return any(getattr(hook, "hook", hook) is _add_missing_level for hook in _torch.list_load_hooks(module))


def _add_missing_level(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the component of `torch.compile` to the names of a module's tensors, unless some of them already have it."""
    level = prefix + _LEVEL
    own = [name for name in state_dict if name.startswith(prefix)]
    if not any(name.startswith(level) for name in own):
        for name in own:
            state_dict[level + name.removeprefix(prefix)] = state_dict.pop(name)
