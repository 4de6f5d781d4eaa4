"""Models larger than a device: loaded, dispatched, and run with weights that are read ahead and streamed.

Here is asked where a dispatched model lies: by prepare(), which must not move it. Light, since every run asks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

EXECUTION = "headway_execution"
"""What runs a dispatched model hangs in its `__dict__` by this name."""
_HOST = ("cpu", "disk")


def spread_over(model: nn.Module, device: torch.device) -> list[str]:
    """The places that a dispatched model's parts lie on; none where moving it to `device` breaks nothing.

    It breaks nothing where a device map names one place, or where all of the model is on `device` already: on the CPU parts
    on "disk" are mapped into memory, and are used there.

    Args:
        model: one that dispatch_model(), transformers' `device_map=` or Accelerate may have placed, as a whole or a part of it.
        device: of this process.
    """
    found: dict[str, None] = {}
    for module in model.modules():
        own = vars(module)
        running: Any = own.get(EXECUTION)  # its `Execution`
        device_map = own.get("hf_device_map")
        named = dict.fromkeys(map(_name, device_map.values())) if isinstance(device_map, Mapping) else {}
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


def _name(place: Any) -> str:
    """A device map's entry as one word: a number is an accelerator's."""
    if isinstance(place, int):
        return f"device {place}"
    text = str(place)
    return text if text in _HOST or text.isalpha() else f"device {text.rpartition(':')[2]}"
