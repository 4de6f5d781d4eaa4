"""Search for the tensors in a model's output, also in objects that are no containers.

A policy network may return a `torch.distributions.Distribution`, a graph network a graph, and a detector an object of its
own. FSDP and DDP look only into containers. Without hooks on the output's tensors, FSDP would not gather a unit's
parameters for backward, and would not reduce their gradients. With `find_unused_parameters=True`, DDP would treat
parameters as unused, although the loss depends on them.
"""

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from headway.core.runtime.collectives.tree import list_leaves
from headway.core.strategies._torch import tree_leaves

_MAX_DEPTH = 6
"""Maximum number of objects inside each other that are searched."""
_NOT_SEARCHED = (
    torch.nn.Module, torch.dtype, torch.device, torch.Size, torch.Generator, type, FunctionType, MethodType, ModuleType,
    int, float, complex, str, bytes, type(None),
)  # fmt: skip
"""Types of values that are not searched for tensors."""


def list_output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, each once: those in containers, and those in attributes of other objects.

    Caches of keys and values are not searched. They also hold the tensors of earlier blocks, which are no outputs.
    """
    if isinstance(output, torch.Tensor):
        return [output]
    found: dict[int, torch.Tensor] = {id(each): each for each in tree_leaves(output) if isinstance(each, torch.Tensor)}
    found.update((id(each), each) for each in _iterate_tensors(output, 0, set()))
    return list(found.values())


def list_hidden_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output that only `list_output_tensors` finds, not torch's own search."""
    if isinstance(output, torch.Tensor):
        return []
    visible = {id(each) for each in tree_leaves(output)}
    return [each for each in list_output_tensors(output) if id(each) not in visible]


def _iterate_tensors(value: Any, depth: int, visited: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and in the attributes of objects.

    Caches of keys and values, values of the types in `_NOT_SEARCHED`, and objects inside of `_MAX_DEPTH` or more others
    are not searched.

    Args:
        value: Value to search.
        depth: Number of objects that contain the value. 0 for the model's output itself.
        visited: IDs of the objects that were searched. Newly searched objects are added.
    """
    try:
        leaves = list(list_leaves(value))
    except RecursionError:  # a container that contains itself, which must not make the forward fail
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif not isinstance(leaf, _NOT_SEARCHED) and id(leaf) not in visited and depth < _MAX_DEPTH:
            visited.add(id(leaf))
            # A cache also holds the tensors of earlier blocks. Cache classes of different libraries have no common base.
            if not any("Cache" in kind.__name__ for kind in type(leaf).__mro__):
                for attribute in _list_attributes(leaf):
                    yield from _iterate_tensors(attribute, depth + 1, visited)


def _list_attributes(item: Any) -> list[Any]:
    """Return the values of an object's attributes, without calling its properties."""
    values = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                values.append(getattr(item, name))
    return values
