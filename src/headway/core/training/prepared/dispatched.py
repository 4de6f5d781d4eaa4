"""Detection of dispatched models, whose parts are on several devices and which `prepare()` must therefore not move."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

EXECUTION = "headway_execution"
"""Key in a dispatched model's `__dict__` for its `Execution`, the hooks that move its weights and inputs."""
_HOST = ("cpu", "disk")
"""Entries of a device map that name no accelerator: host memory and disk."""


def list_spread_places(model: nn.Module, device: torch.device) -> list[str]:
    """Return the places (devices, "cpu", "disk") over which a dispatched model is spread, or [] if it may be moved.

    `prepare()` may move a model whose device map names at most one place, unless that is "disk". It may also move a
    model that is completely on `device`, if the model has Headway's hooks or `device` is the CPU. Parts on "disk" count
    as being on the CPU, because they are memory-mapped.

    Args:
        model: Model that dispatch_model(), transformers' `device_map=` or Accelerate may have placed, completely or in
            part.
        device: Device of this process.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        own = vars(module)
        running: Any = own.get(EXECUTION)  # its `Execution`
        device_map = own.get("hf_device_map")
        named = dict.fromkeys(map(_name_place, device_map.values())) if isinstance(device_map, Mapping) else {}
        if running is not None:
            is_spread = not running.is_all_on(device)
        else:
            is_on_host = device.type == "cpu" and not named.keys() - set(_HOST)
            is_one = len(named) <= 1 and "disk" not in named
            lies_there = all(each.device == device for each in (*module.parameters(), *module.buffers()))
            is_spread = not is_one and not (is_on_host and lies_there)
        if is_spread:
            found.update(named or {str(device): None})
    return sorted(found)


def _name_place(place: Any) -> str:
    """Return a place in a device map as text, such as "cpu" or "device 0"."""
    if isinstance(place, int):
        return f"device {place}"
    text = str(place)
    return text if text in _HOST or text.isalpha() else f"device {text.rpartition(':')[2]}"
