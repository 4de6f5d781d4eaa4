"""Blocks of a model (its repeated modules, or those that options name), and helpers for its module tree.

Activation checkpointing, compilation and sharding work on blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from headway.errors import ConfigError, PrepareError

ORIGINAL_CLASS = "_headway_bare_class"
"""Attribute in which a block whose class was replaced by a subclass keeps its original class."""
EXTENDED_CLASS = "_headway_extended_class"
"""Attribute of a class that Headway created from a mixin and a module's class: the module's class."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""Containers whose repeated children count as blocks."""
_NOT_CALLED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Containers that have no forward."""


def find_blocks(model: torch.nn.Module, selectors: tuple[Any, ...] = ()) -> list[torch.nn.Module]:
    """Return the blocks of a model in the order of its module tree, each once, without blocks inside of other blocks.

    Args:
        model: Any module.
        selectors: Classes, class names, or module names. Default: (), which selects repeated modules: children of a
            ModuleList, Sequential or ModuleDict that have submodules and whose class occurs at least twice.

    Raises:
        ConfigError: If nothing in the model matches one of the selectors.
    """
    if selectors:
        for selector in selectors:
            if not any(is_selected(name, module, (selector,)) for name, module in model.named_modules()):
                raise ConfigError(
                    f"blocks names {selector!r}, which {type(model).__name__} does not contain; "
                    "give classes, class names or module names"
                )
        block_ids = {id(module) for name, module in model.named_modules() if is_selected(name, module, selectors)}
    else:
        block_ids = _find_repeated_modules(model)
    return list(find_outermost(model.children(), lambda module: id(module) in block_ids))


def _find_repeated_modules(model: torch.nn.Module) -> set[int]:
    """Return the IDs of modules in containers that have submodules and whose class occurs at least twice."""
    ids_by_class: dict[type, list[int]] = {}
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        # Unlike `children()`, iteration over a ModuleList repeats a module that occurs several times in it.
        children = container if isinstance(container, torch.nn.ModuleList) else container.children()
        for child in children:
            has_submodules = any(True for _ in child.children())
            if has_submodules and not isinstance(child, _NOT_CALLED):
                ids_by_class.setdefault(get_original_class(child), []).append(id(child))
    return {block_id for ids in ids_by_class.values() if len(ids) > 1 for block_id in ids}


def is_selected(name: str, module: torch.nn.Module, selectors: tuple[Any, ...]) -> bool:
    """Whether one of the selectors is a class of the module, the name of its class, or its name in the model.

    Args:
        name: Name of the module in the model.
        module: Module to test.
        selectors: Classes, class names, or module names.
    """
    names = (name, get_original_class(module).__name__)
    return any(
        isinstance(module, selector) if isinstance(selector, type) else selector in names for selector in selectors
    )


def get_original_class(module: torch.nn.Module) -> type:
    """Return a module's original class, even if `prepare()` or torch's `fully_shard` has replaced it by a subclass."""
    module_class = module.__dict__.get(ORIGINAL_CLASS, type(module))
    while True:
        # Headway may extend a class before fully_shard does, and after it.
        extended_class = get_unsharded_class(vars(module_class).get(EXTENDED_CLASS, module_class))
        if extended_class is module_class:
            return module_class
        module_class = extended_class


def get_class_name(module: torch.nn.Module) -> str:
    """Return the name of a module's original class, for messages: `fully_shard` names its subclasses FSDPLlamaModel, for example."""
    return get_original_class(module).__name__


def get_unsharded_class(module_class: type) -> type:
    """Return the class that torch's `fully_shard` has extended, or the given class if `fully_shard` did not create it."""
    return module_class.__bases__[1] if _is_sharded_class(module_class) else module_class


def _is_sharded_class(module_class: type) -> bool:
    """Whether `fully_shard` created the class. Its bases are then FSDPModule and the class that was extended."""
    # FSDPModule is recognized by its name, because importing torch.distributed.fsdp is slow, and most runs do not shard models.
    first_base = module_class.__bases__[0]
    return first_base.__name__ == "FSDPModule" and first_base.__module__.startswith("torch.distributed.")


def replace_class(module: torch.nn.Module, new_class: Any) -> None:
    """Replace a module's class. If `fully_shard` was called on the module, the new class is extended in the same way.

    Args:
        module: Module to change.
        new_class: Class of the module without `fully_shard`. Its instances must have the same layout.
    """
    current: Any = type(module)
    module.__class__ = _create_sharded_class(current, new_class) if _is_sharded_class(current) else new_class


@cache
def _create_sharded_class(example: Any, module_class: Any) -> type:
    """Return the class that `fully_shard` would create for a module's class.

    Args:
        example: Class that `fully_shard` created for another module.
        module_class: Class to extend.
    """
    namespace = {"__deepcopy__": example.__deepcopy__}  # the only attribute that `fully_shard` adds; it refuses copies
    return type(f"FSDP{module_class.__name__}", (example.__bases__[0], module_class), namespace)


def find_outermost(
    roots: Iterable[torch.nn.Module], is_match: Callable[[torch.nn.Module], bool]
) -> Iterator[torch.nn.Module]:
    """Yield the modules for which `is_match` returns true, each once, in the order of the module tree.

    A module inside another such module is not yielded.

    Args:
        roots: Modules to search, together with all modules below them.
        is_match: Function that returns whether to yield a module.
    """
    stack, seen = list(roots)[::-1], set()
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_match(module):
            yield module
        else:
            stack += reversed(list(module.children()))


class ParameterOwner(NamedTuple):
    """Module that contains a parameter.

    Attributes:
        module_name: Name of the module in the model.
        module: The module.
        parameter_name: Name of the parameter in the module.
    """

    module_name: str
    module: torch.nn.Module
    parameter_name: str


def find_parameter_owners(model: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, list[ParameterOwner]]]:
    """Return a dict from each parameter's ID to the parameter and the modules that directly contain it.

    A tied parameter is in several modules.
    """
    owners: dict[int, tuple[torch.nn.Parameter, list[ParameterOwner]]] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            _, modules = owners.setdefault(id(parameter), (parameter, []))
            modules.append(ParameterOwner(module_name, module, parameter_name))
    return owners


def is_container(module: torch.nn.Module) -> bool:
    """Whether a module has no forward, such as a `ModuleList` or a `ParameterDict`: other modules use what it contains."""
    return type(module).forward is torch.nn.Module.forward and "forward" not in vars(module)


def extend_class(module: torch.nn.Module, mixin: Any) -> None:
    """Replace a module's class by a subclass in which a mixin precedes the module's own class.

    Args:
        module: Module to change.
        mixin: Class that precedes the module's own.

    Raises:
        PrepareError: If the class cannot be extended.
    """
    original: Any = type(module)
    try:
        module.__class__ = _create_subclass(mixin, original)
    except TypeError as error:
        raise PrepareError(f"the class {original.__qualname__} cannot be extended: {error}") from error


@cache
def _create_subclass(mixin: Any, original: Any) -> type:
    """Return the class that inherits from the mixin and from a module's class.

    It is created once for each module class, because the guards of torch.compile compare classes.
    """
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__, EXTENDED_CLASS: original}
    return type(original.__name__, (mixin, original), namespace)
