"""Detection of dispatched models, whose parts are on several devices and which `prepare()` must therefore not move."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

EXECUTION = "headway_execution"
"""Key in a dispatched model's `__dict__` for its `Execution`, the hooks that move its weights and inputs."""
_HOST = {"cpu", "disk"}
"""Entries of a device map that name no accelerator: host memory and disk."""


def list_dispatch_places(model: nn.Module, device: torch.device) -> list[str]:
    """Return the places over which a dispatched model is spread, sorted, or [] if it may be moved.

    A place is "cpu", "disk", or a device such as "device 0". `prepare()` may move a model whose device map names at most
    one place, unless that is "disk". It may also move a model that is completely on `device`, if the model has Headway's
    hooks or `device` is the CPU. Parts on "disk" count as being on the CPU, because they are memory-mapped.

    Args:
        model: Model that dispatch_model(), transformers' `device_map=` or Accelerate may have placed, completely or in
            part.
        device: Device of this process.
    """
    all_places: set[str] = set()
    for module in model.modules():  # parts of a model can be dispatched separately
        execution: Any = vars(module).get(EXECUTION)
        device_map = vars(module).get("hf_device_map")
        places = set(map(_name_place, device_map.values())) if isinstance(device_map, Mapping) else set[str]()
        if execution is not None:
            is_spread = not execution.is_all_on(device)
        elif len(places) <= 1 and "disk" not in places:
            is_spread = False
        else:
            is_mapped_to_host = device.type == "cpu" and places <= _HOST
            is_on_device = all(each.device == device for each in (*module.parameters(), *module.buffers()))
            is_spread = not (is_mapped_to_host and is_on_device)
        if is_spread:
            all_places |= places or {str(device)}
    return sorted(all_places)


def _name_place(place: Any) -> str:
    """Return a place in a device map as text, such as "cpu" or "device 0"."""
    if isinstance(place, int):
        return f"device {place}"
    text = str(place)
    return text if text in _HOST or text.isalpha() else f"device {text.rpartition(':')[2]}"
