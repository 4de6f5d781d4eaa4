"""Sizes and balanced budgets by Accelerate's rules, from which its maps follow. Headway's own are in `headway.offload`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.modules.module_parts import get_module_leaves
from headway.offload.placement import sizes
from headway.offload.placement.budget import Device, get_max_memory
from headway.offload.placement.sizes import Dtype, as_dtype, class_names, named_module_tensors

_KEPT = ("torch.uint", "torch.int", "torch.bool")
"""Kinds of dtype that loading does not convert."""


def dtype_byte_size(dtype: Any) -> int | float:
    """Bytes of one element; of a truth value an eighth, as Accelerate has it, although torch takes a whole byte."""
    return 1 / 8 if dtype == torch.bool else sizes.dtype_byte_size(dtype)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> Counter[str]:
    """Bytes of every module and tensor by name; "" is the whole model.

    Args:
        model: on any device, the meta device included.
        dtype: what the model will be loaded with; a tensor of a narrower type keeps its own.
        special_dtypes: {tensor name: dtype} that come before `dtype`.
        buffers_only: leave parameters out.
    """
    special = {name: dtype_byte_size(as_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    width = None if dtype is None else dtype_byte_size(as_dtype(dtype))
    found: Counter[str] = Counter()
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        own = dtype_byte_size(tensor.dtype)
        converted = own if width is None or str(tensor.dtype).startswith(_KEPT) else min(width, own)
        size: Any = tensor.numel() * special.get(name, converted)
        parts = name.split(".")
        for count in range(len(parts) + 1):
            found[".".join(parts[:count])] += size
    return found


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers; the arguments are those of compute_module_sizes."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Budgets that spread a model evenly over the accelerators, each with room for a layer more; the last keeps its own.

    Args:
        model: on any device, the meta device included.
        max_memory: as of get_max_memory.
        no_split_module_classes: class names of modules whose parts must lie on one device.
        dtype, special_dtypes: as of compute_module_sizes.
        low_zero: leave as little as possible on device 0, for generation.
    """
    budgets = get_max_memory(max_memory)
    accelerators = [device for device, size in budgets.items() if device not in ("cpu", "disk") and size > 0]
    indices: list[Any] = [device for device in accelerators if isinstance(device, int)]
    if not accelerators:
        return budgets
    if len(accelerators) == 1:
        low_zero = False
        if max_memory is None and indices:
            budgets[indices[0]] = int(0.9 * budgets[indices[0]])
    found = compute_module_sizes(model, dtype, special_dtypes)
    share = int(found[""] // (len(accelerators) - low_zero) + int(1.25 * _room(model, found, no_split_module_classes)))
    for device in indices[:-1]:
        if not (low_zero and device == 0):
            budgets[device] = min(share, budgets[device])
    if low_zero:
        rest = max(0, found[""] - sum(budgets[device] for device in range(1, len(accelerators))))
        budgets[0] = min(rest, budgets[0])
    return budgets


def _room(model: nn.Module, found: Counter[str], whole: Iterable[str] | str | None) -> int:
    """The largest of: the first module of each class that stays whole, and the mean of the modules without children."""
    modules, names, first = dict(model.named_modules()), class_names(whole), dict[str, int]()
    for name, size in found.items():
        kind = type(modules.get(name)).__name__
        if name and kind in names:
            first.setdefault(kind, size)
    tensors = set(get_module_leaves(found))
    leaves = get_module_leaves(name for name in found if name not in tensors)
    return max([int(sum(found[name] for name in leaves) / max(len(leaves), 1)), *first.values()])
