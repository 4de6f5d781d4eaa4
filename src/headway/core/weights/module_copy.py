"""Copies of modules that use other tensors, such as full tensors in place of shards."""

from collections.abc import Mapping
from typing import Any

import torch

from headway.core.weights.compiled import remove_compiled_levels


def copy_with_tensors(module: torch.nn.Module, values: Mapping[str, torch.Tensor], path: str = "") -> torch.nn.Module:
    """Return a copy of a module, without forward hooks, in which the given tensors replace the module's own.

    Tensors for which no replacement is given are shared with the original. A replaced parameter becomes a parameter
    that requires no gradient.

    Args:
        module: Module to copy.
        values: Replacement tensors by name. Names lack the prefixes of `torch.compile`.
        path: Prefix of the module's names in `values`, used when the function calls itself for submodules. Default: "".
    """
    copy: Any = object.__new__(type(module))
    copy.__dict__.update({
        key: value.copy() if type(value) in (list, dict, set) else value for key, value in vars(module).items()
    })  # fmt: skip
    # A sharded module's hooks would gather its shards, which requires all ranks.
    copy.__dict__.update(_forward_hooks={}, _forward_pre_hooks={})
    for table in (copy._parameters, copy._buffers):
        for key in [key for key in table if path + key in values]:
            value = values[path + key]
            table[key] = torch.nn.Parameter(value, requires_grad=False) if table is copy._parameters else value
    for key, child in module._modules.items():
        copy._modules[key] = (
            None if child is None else copy_with_tensors(child, values, remove_compiled_levels(f"{path}{key}."))
        )
    return copy  # type: ignore[no-any-return]
