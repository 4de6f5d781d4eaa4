"""The blocks of a model: what is repeated in its module tree, or what was named.

Activation checkpointing, compilation and sharding go by them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from headway.errors import ConfigError, PrepareError

BARE_CLASS = "_headway_bare_class"
"""Where a block whose class was exchanged keeps the one it had."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def find_blocks(model: torch.nn.Module, wanted: tuple[Any, ...] = ()) -> list[torch.nn.Module]:
    """The blocks of a model, in the order of its tree, each once; blocks inside of blocks are left out.

    Args:
        model: any module.
        wanted: classes, class names, or names of modules; none: modules with parts of their own that lie in a ModuleList,
            Sequential or ModuleDict and whose class does so at least twice.

    Raises:
        ConfigError: nothing in the model is what was named.
    """
    if wanted:
        for one in wanted:
            if not any(is_wanted(name, module, (one,)) for name, module in model.named_modules()):
                raise ConfigError(
                    f"blocks names {one!r}, which {type(model).__name__} does not contain; give classes, class names or module names"
                )
        matching = {id(module) for name, module in model.named_modules() if is_wanted(name, module, wanted)}
    else:
        repeated: dict[type, list[int]] = {}
        for container in model.modules():
            if isinstance(container, _CONTAINERS):
                for child in container.children() if not isinstance(container, torch.nn.ModuleList) else container:
                    if any(True for _ in child.children()) and not isinstance(child, _NOT_CALLED):
                        repeated.setdefault(bare_class(child), []).append(id(child))
        matching = {known for members in repeated.values() if len(members) > 1 for known in members}
    return list(outermost(model.children(), lambda module: id(module) in matching))


def is_wanted(name: str, module: torch.nn.Module, wanted: tuple[Any, ...]) -> bool:
    """Is it of one of the classes, or called like one of the classes or modules?"""
    return any(
        isinstance(module, one) if isinstance(one, type) else one in (name, bare_class(module).__name__)
        for one in wanted
    )


def bare_class(module: torch.nn.Module) -> type:
    """The user's class."""
    bare: type = module.__dict__.get(BARE_CLASS, type(module))
    return bare


def outermost(roots: Iterable[torch.nn.Module], is_one: Callable[[torch.nn.Module], bool]) -> Iterator[torch.nn.Module]:
    """The modules among and below `roots` for which `is_one` holds and that lie in no other such module, each once."""
    waiting, seen = list(roots)[::-1], set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_one(module):
            yield module
        else:
            waiting += reversed(list(module.children()))


Holder = tuple[str, torch.nn.Module, str]
"""A module's name, the module, and the name of a parameter in it."""


def holders_of(model: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, list[Holder]]]:
    """By id, each parameter of a model and all that hold it: several where it is tied."""
    found: dict[int, tuple[torch.nn.Parameter, list[Holder]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append((name, module, key))
    return found


def extend(module: torch.nn.Module, mixin: Any) -> None:
    """Put a class before a module's own.

    Raises:
        PrepareError: its class cannot be extended.
    """
    bare: Any = type(module)
    try:
        module.__class__ = _extended(mixin, bare)
    except TypeError as error:
        raise PrepareError(f"the class {bare.__qualname__} cannot be extended: {error}") from error


@cache
def _extended(mixin: Any, bare: Any) -> type:
    """One for all modules of a class: the compiler's guards look at it."""
    return type(bare.__name__, (mixin, bare), {"__module__": bare.__module__, "__doc__": bare.__doc__})
